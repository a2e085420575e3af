"use strict";
// Elements from data. Whatever a model wrote becomes text, never markup.

function make(tag, options, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "class") element.className = value;
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity))
    if (child !== null && child !== undefined && child !== false)
      element.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  return element;
}

// Characters that do not show, or that turn the direction of what follows, as a mark; of the same number of characters.
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
}

function table(head, rows, options) {
  const cell = (kind, scope) => (value) => {
    const text = String(value), numeric = /^[-+<]?\s?[\d.]/.test(text);
    return make(kind, { scope, class: text.length < 10 ? "short" : numeric ? "number" : null }, value);
  };
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": (options || {}).label || "Table" },
    make("table", null,
      make("thead", null, make("tr", null, head.map(cell("th", "col")))),
      make("tbody", null, rows.map((row) => make("tr", null, row.map((value, i) =>
        i ? cell("td")(value) : cell("th", "row")(value)))))));
}

function choice(label, values, chosen, change, id) {
  const select = make("select", { id, on: { change: () => change(select.value) } },
    values.map(([value, text]) => make("option", { value, selected: value === chosen }, text)));
  return make("label", null, label + " ", select);
}

function said(sentence) {
  return make("p", { class: "said" }, sentence);
}

const percent = (x) => (x === null || x === undefined ? "-" : (100 * x).toFixed(1) + "%");
const signed = (x) => (x > 0 ? "+" : "") + x.toFixed(1);
const points = (x) => (Math.abs(100 * x) < 0.05 ? "0.0" : signed(100 * x));

function short(x) {
  if (x === null || x === undefined) return "-";
  if (typeof x !== "number" || Number.isInteger(x)) return String(x);
  const size = Math.abs(x);
  return size >= 1e5 || size < 1e-3 ? x.toExponential(2) : String(Number(x.toPrecision(4)));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  return seconds < 600 ? seconds.toFixed(0) + " s" : seconds < 7200 ? (seconds / 60).toFixed(1) + " min"
    : (seconds / 3600).toFixed(1) + " h";
}
