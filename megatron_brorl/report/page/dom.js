"use strict";
// Create elements from data. Text of a model becomes text nodes, never markup.

function make(tag, options, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, ...children);
  return element;
}

function append(element, ...children) {
  for (const child of children.flat(Infinity))
    if (child !== null && child !== undefined && child !== false)
      element.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
}

// Replace control characters and characters that change the direction of the text, one for one.
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
}

function table(label, head, rows) {
  const cell = (kind, scope) => (value) => {
    const text = String(value), numeric = /^[-+<]?\s?[\d.]/.test(text);
    return make(kind, { scope, class: text.length < 10 ? "short" : numeric ? "number" : null }, value);
  };
  const line = (row) => make("tr", null, row.map((value, i) => (i ? cell("td")(value) : cell("th", "row")(value))));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    make("table", null, make("thead", null, make("tr", null, head.map(cell("th", "col")))), make("tbody", null, rows.map(line))));
}

function choice(label, values, chosen, change, id) {
  const select = make("select", { id, on: { change: () => change(select.value) } },
    values.map(([value, text]) => make("option", { value, selected: value === chosen }, text)));
  return make("label", null, label + " ", select);
}

const placeholder = (sentence) => make("p", { class: "placeholder" }, sentence);
const note = (...parts) => make("p", { class: "note" }, parts);
// Round as Python does in the verdict: by the exact binary value, as toFixed does, but ties to even instead of up.
const is_tie = (x, digits) => /^50*$/.test(x.toFixed(digits + 50).slice(-50));
const fixed = (x, digits) => (is_tie(x, digits) && /[13579]$/.test(x.toFixed(digits)) ? x - Math.sign(x) * 0.5 * 10 ** -digits : x).toFixed(digits);
const tenths = (x) => fixed(x, 1), four_digits = (x) => String(Number(fixed(x, Math.max(3 - Math.floor(Math.log10(Math.abs(x))), 0))));
const percent = (x) => (x === null || x === undefined ? "-" : tenths(100 * x) + "%");
const points = (x) => (Math.abs(100 * x) < 0.05 ? "0.0" : (x > 0 ? "+" : "") + tenths(100 * x));
const signed = (x) => (x > 0 ? "+" : "") + short(x);
const whole = (x) => (x === null || x === undefined ? "-" : Math.round(x).toLocaleString("en"));
const of_p = (p) => (p < 1e-4 ? "< 0.0001" : p.toFixed(4));
const last_of = (list) => list[list.length - 1];

function short(x) {
  if (x === null || x === undefined) return "-";
  if (typeof x !== "number" || Number.isInteger(x)) return String(x);
  const size = Math.abs(x);
  return size >= 1e6 || size < 1e-4 ? x.toExponential(3) : four_digits(x);
}

function interval(p, form = percent) {
  if (!p) return "-";
  return p.low === undefined ? form(p.mean) : `${form(p.mean)} (${form(p.low)} to ${form(p.high)})`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  return seconds < 600 ? seconds.toFixed(0) + " s" : seconds < 7200 ? (seconds / 60).toFixed(1) + " min" : (seconds / 3600).toFixed(1) + " h";
}

const when = (steps) => (steps ? `after ${steps} step${steps === 1 ? "" : "s"}` : "before training");
