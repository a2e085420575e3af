"use strict";
// What was sampled: a list of prompts, and the responses of one of them token by token.

let held = null; // the rollouts that are shown: of a running run the content may be newer
const opened = new Map(); // chunk number -> promise of what it holds
const MOST_LISTED = 300;
const PROBABILITIES = [0.9, 0.5, 0.2, 0.05, 0.01]; // bounds between the colours of tokens

function chunk(number) {
  const texts = held.chunks;
  if (!opened.has(number)) opened.set(number, (async () => {
    const bytes = Uint8Array.from(atob(texts[number]), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  })());
  return opened.get(number);
}

function momentName(m) {
  return m.kind === "step" ? `training step ${m.number}` : m.number ? `evaluation after ${m.number} steps` : "evaluation before the first step";
}

const FILTERS = {
  all: ["all prompts", () => true],
  mixed: ["right and wrong", (g) => g.outcome === "mixed"],
  right: ["all right", (g) => g.outcome === "right"],
  wrong: ["all wrong", (g) => g.outcome === "wrong"],
  solved: ["newly solved", (g, run) => run.change && run.change.solved.some((p) => p.id === g.prompt_id)],
  lost: ["newly lost", (g, run) => run.change && run.change.lost.some((p) => p.id === g.prompt_id)],
  here: ["with rollouts here", (g, run, m) => where(m, g) !== undefined],
};

function where(m, g) {
  return held.where[`${m}/${g.group}`];
}

function command(run, m, g) {
  const quote = (s) => (/^[\w@%+=:,./-]+$/.test(s) ? s : "'" + s.replaceAll("'", "'\\''") + "'");
  return `brorl rollouts ${quote(run.folder)} --${m.kind} ${m.number}` + (g ? ` --prompt ${quote(g.prompt_id)}` : "");
}

let browser = null; // what the keys act on

function rollouts(parent, run) {
  const data = held = content.rollouts;
  opened.clear();
  browser = null;
  if (!data.moments.length) return append(parent, [said(run.missing.rollouts || "No room for rollouts in this file: make it larger with --megabytes.")]);
  const order = data.moments.map((m, place) => ({ ...m, place }));
  const listed = [...order].sort((a, b) => (a.kind === b.kind ? a.number - b.number : a.kind < b.kind ? -1 : 1));

  // What this file holds, and where the rest is.
  const left = data.recorded.rollouts - data.held.rollouts;
  append(parent, [make("p", { class: "note" },
    `Here are ${data.held.rollouts.toLocaleString("en")} rollouts of ${data.held.groups.toLocaleString("en")} groups at ${data.moments.length} of ${data.moments_recorded} recorded moments`,
    left > 0 ? `; ${left.toLocaleString("en")} recorded ones of these moments are left out, for the file takes at most ${content.megabytes} MB and shows at most 16 siblings of a prompt. ` : "; none is left out. ",
    left > 0 || data.moments.length < data.moments_recorded ? ["All of them: ", make("code", null, `brorl rollouts ${run.folder}`), "."] : null)]);
  if (run.missing.steps) append(parent, [said(run.missing.steps)]);

  const list = make("ul", { class: "list", role: "listbox", tabindex: "0", "aria-label": "Prompts", id: "prompts-list" });
  const pane = make("div", { class: "pane", "aria-live": "off" });
  const count = make("span", { role: "status", class: "note" });
  const search = make("input", { type: "search", id: "search", placeholder: "id or text of the prompt", value: state.search, on: { input: () => { state.search = search.value; fill(); } } });
  const moment = choice("When", listed.map((m) => [String(m.place), momentName(m)]), String(chosen().place), (v) => { choose(order[Number(v)]); load(); }, "moment");
  const filter = choice("Which", Object.entries(FILTERS).map(([k, [text]]) => [k, text]), state.filter, (v) => { state.filter = v; fill(); }, "filter");
  const colours = choice("Colour of tokens", [["log_prob", "log-prob"], ["advantage", "advantage of the response"], ["none", "none"]], state.colours, (v) => { state.colours = v; paint(pane); }, "colours");
  append(parent, [
    make("div", { class: "controls" }, moment, filter, make("label", { for: "search" }, "Search ", search), colours, count),
    make("p", { class: "note" }, "Keys: ", ["j", "k"].map((k) => make("kbd", null, k)), " or arrows in the list: next and previous prompt; ", make("kbd", null, "/"), ": search; ", ["l", "h"].map((k) => make("kbd", null, k)), ": next and previous response."),
    make("div", { class: "browser" }, list, pane)]);

  let groups = [], rows = [], selected = -1;

  function chosen() {
    return order.find((m) => m.kind === state.kind && m.number === state.number) || order[0];
  }
  function choose(m) {
    state.kind = m.kind;
    state.number = m.number;
  }
  async function load() {
    const m = chosen();
    document.getElementById("moment").value = String(m.place);
    groups = await chunk(m.list);
    if (m !== chosen()) return; // another one was asked for meanwhile
    fill();
  }
  function fill() {
    const words = state.search.toLowerCase().split(/\s+/).filter(Boolean), m = chosen();
    const [, passes] = FILTERS[state.filter];
    rows = groups.filter((g) => passes(g, run, m.place) && words.every((w) => `${g.prompt_id} ${g.excerpt || ""}`.toLowerCase().includes(w)));
    // The hardest first: those are what one looks for.
    rows.sort((a, b) => a.right / (a.rollouts || 1) - b.right / (b.rollouts || 1) || a.group - b.group);
    const shown = rows.slice(0, MOST_LISTED);
    count.textContent = `${rows.length} of ${groups.length} prompts` + (shown.length < rows.length ? `, the first ${shown.length} are listed` : "");
    list.replaceChildren(...shown.map((g, i) => make("li", { role: "option", id: `option-${i}`, class: g.outcome, on: { click: () => select(i).then(() => { if (innerWidth <= 760) pane.scrollIntoView(); }) } },
      make("span", { class: "of" }, `${g.right}/${g.rollouts}`), bar(g.rollouts ? g.right / g.rollouts : 0),
      make("span", { class: "id" }, g.prompt_id), make("span", { class: "excerpt" }, g.excerpt === null ? "(numbers alone are recorded)" : g.excerpt))));
    rows = shown;
    const again = shown.findIndex((g) => g.prompt_id === state.prompt && (state.group === null || g.group === state.group));
    if (!shown.length) {
      selected = -1;
      list.replaceChildren(make("li", { class: "none" }, "No prompt passes search and filter."));
      pane.replaceChildren();
    } else {
      // Else one with right and wrong responses to compare.
      const here = (g) => where(m.place, g), mixed = shown.findIndex((g) => here(g) && g.outcome === "mixed");
      select(again >= 0 ? again : mixed >= 0 ? mixed : Math.max(0, shown.findIndex(here)));
    }
  }
  async function select(i) {
    if (i < 0 || i >= rows.length) return;
    for (const option of list.querySelectorAll("[aria-selected]")) option.removeAttribute("aria-selected");
    selected = i;
    const option = list.children[i], m = chosen(), g = rows[i];
    option.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", option.id);
    // Within the list alone: the page stays where it is.
    if (option.offsetTop < list.scrollTop || option.offsetTop + option.offsetHeight > list.scrollTop + list.clientHeight)
      list.scrollTop = option.offsetTop - list.clientHeight / 3;
    state.prompt = g.prompt_id;
    state.group = g.group;
    const at = where(m.place, g);
    const unit = at ? (await chunk(at[0]))[at[1]] : null;
    if (rows[selected] !== g) return;
    show(pane, run, m, g, unit);
  }
  browser = {
    move: (by) => select(Math.min(Math.max(selected + by, 0), rows.length - 1)),
    response: (by) => nextResponse(pane, by),
    search: () => search.focus(),
    open: (kind, number, prompt) => {
      Object.assign(state, { kind, number, prompt, group: null, search: "", filter: "all" });
      search.value = "";
      document.getElementById("filter").value = "all";
      load();
    },
  };
  list.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity, PageDown: 10, PageUp: -10 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    browser.move(by);
  });
  load();
}

function bar(share) {
  const inner = make("span");
  inner.style.width = 100 * share + "%";
  return make("span", { class: "bar", "aria-hidden": "true" }, inner);
}

function openPrompt(kind, number, id) {
  if (!browser) return;
  browser.open(kind, number, id);
  document.getElementById("rollouts").scrollIntoView();
}

function show(pane, run, m, g, unit) {
  pane.scrollTop = 0;
  const parts = [
    make("h3", null, g.prompt_id),
    make("p", null, `${momentName(m)}: right ${g.right} of ${g.rollouts}, ${g.distinct} distinct answers, ${g.tokens === null ? "-" : g.tokens.toFixed(1)} tokens in the mean` +
      (m.kind === "step" ? (g.trained ? ", trained on" : ", not trained on") : "") + `; judged as ${g.verifier}`),
  ];
  if (!unit) {
    parts.push(said(g.excerpt === null ? "Of this group the numbers alone are recorded (run.record_groups)." : "Its rollouts are not in this file. All of them:"));
    if (g.excerpt !== null) parts.push(make("pre", null, command(run, m, g)));
    pane.replaceChildren(...parts);
    return;
  }
  parts.push(make("pre", { class: "text prompt" }, unit.prompt));
  if (unit.reference !== null) parts.push(make("p", null, "Reference answer: ", make("code", null, unit.reference)));
  parts.push(answers(unit.rollouts));
  if (unit.rollouts.length < g.rollouts) parts.push(make("p", { class: "note" }, `${unit.rollouts.length} of its ${g.rollouts} rollouts are here. All that are recorded: `, make("code", null, command(run, m, g))));
  const readout = make("p", { class: "readout", role: "status" }, "Point at a token, or tap it, for its log-prob.");
  const tell = (event) => { const t = event.target.closest(".t"); if (t && t.title) readout.textContent = t.title; };
  const cards = make("div", { class: "cards", on: { pointerover: tell, click: tell } }, unit.rollouts.map(card));
  parts.push(make("div", { class: "legend" }), readout, cards);
  pane.replaceChildren(...parts.flat());
  paint(pane);
}

function answers(found) {
  const counts = new Map();
  for (const r of found) {
    const key = JSON.stringify([r.answer, r.right]);
    counts.set(key, (counts.get(key) || 0) + 1);
  }
  const rows = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 8).map(([key, n]) => [JSON.parse(key), n]);
  return make("ul", { class: "answers" }, rows.map(([[answer, right], n]) => make("li", { class: right ? "right" : "wrong" },
    `${n} x `, make("code", null, answer === null ? "(no answer)" : answer.length > 60 ? answer.slice(0, 60) + "..." : answer), right ? " right" : " wrong")));
}

function card(r) {
  const facts = [`reward ${short(r.reward)}`, `sibling ${r.sibling}`, `${r.tokens} tokens`, r.finish === "length" ? "cut off" : "ended by itself"];
  if (r.advantage !== null) facts.push(`advantage ${r.advantage > 0 ? "+" : ""}${r.advantage.toFixed(2)}`);
  if (r.status && r.status !== "ok") facts.push(r.status);
  for (const [name, value] of r.parts) facts.push(`${name} ${short(value)}`);
  const text = make("pre", { class: "text", "data-advantage": r.advantage === null ? "" : r.advantage });
  if (r.lengths) tokens(text, r);
  else append(text, [r.text, make("span", { class: "note" }, "\n(Its tokens hold parts of characters, and are not shown one by one.)")]);
  const element = make("article", { class: "card " + (r.right ? "right" : "wrong"), tabindex: "-1" },
    make("p", { class: "facts" }, make("b", null, r.right ? "\u2713 right" : "\u2717 wrong"), ", " + facts.join(", ")),
    r.reason ? make("p", { class: "reason" }, "Reason: " + r.reason) : null, text);
  return element;
}

function tokens(place, r) {
  const characters = Array.from(r.text); // a character of the record is a code point, not half of a pair
  let begin = 0;
  r.lengths.forEach((length, i) => {
    const own = characters.slice(begin, begin + length).join("");
    begin += length;
    const p = r.log_probs ? r.log_probs[i] : null;
    const title = `token ${i + 1}` + (p === null ? ": no log-prob is recorded" : `: log-prob ${p.toFixed(3)}, probability ${(100 * Math.exp(p)).toPrecision(3)}%`);
    const level = p === null ? "" : PROBABILITIES.filter((bound) => Math.exp(p) < bound).length;
    place.append(make("span", { class: "t" + (length ? "" : " empty"), title, "data-level": level }, length ? own : "\u25a0"));
  });
  append(place, [characters.slice(begin).join("")]);
}

// Colours of what is shown, without making it again.
function paint(pane) {
  const texts = [...pane.querySelectorAll("pre[data-advantage]")];
  const most = Math.max(1e-9, ...texts.map((t) => Math.abs(Number(t.dataset.advantage))));
  for (const t of texts) {
    t.dataset.colours = state.colours;
    const a = Number(t.dataset.advantage);
    t.style.setProperty("--tint", (70 * Math.abs(a)) / most + "%");
    t.dataset.sign = t.dataset.advantage === "" || !a ? "" : a > 0 ? "plus" : "minus";
  }
  const legend = pane.querySelector(".legend");
  if (!legend) return;
  const bounds = ["90% and more", "50 to 90%", "20 to 50%", "5 to 20%", "1 to 5%", "below 1%"];
  const known = pane.querySelector('.card .t[data-level]:not([data-level=""])');
  legend.replaceChildren(...(state.colours === "log_prob" && !known ? ["No log-probs are recorded here: the engine was not asked for them."] : state.colours === "log_prob" ? ["Probability of each token: ", ...bounds.map((b, i) => make("span", { class: "t", "data-level": i }, b))]
    : state.colours === "advantage" ? [texts.some((t) => t.dataset.advantage) ? "Blue: above its group (positive advantage); orange: below. An evaluation and an untrained group have none." : "No response here has an advantage: nothing was trained on it."] : []));
  legend.dataset.colours = state.colours;
}

function nextResponse(pane, by) {
  const cards = [...pane.querySelectorAll(".card")];
  const now = cards.indexOf(document.activeElement);
  const next = cards[Math.min(Math.max(now + by, 0), cards.length - 1)];
  if (next) next.focus();
}

document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape" && typing) return event.target.blur();
  if (typing || !browser || event.ctrlKey || event.metaKey || event.altKey) return undefined;
  const acts = { j: () => browser.move(1), k: () => browser.move(-1), l: () => browser.response(1), h: () => browser.response(-1), "/": () => browser.search() };
  if (!(event.key in acts)) return undefined;
  event.preventDefault();
  if (event.key !== "/" && !document.getElementById("rollouts").contains(event.target)) document.getElementById("rollouts").scrollIntoView({ block: "nearest" });
  return acts[event.key]();
});
