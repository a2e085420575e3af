"use strict";
// The list of prompts, the responses to the selected prompt, and the page of all sections.

const opened = new Map(); // chunk number -> promise of its content
const MOST_LISTED = 300;
let openPrompt = () => {}; // set by rollouts(): selects a prompt of an evaluation

function chunk(number) {
  if (!opened.has(number)) opened.set(number, (async () => {
    const bytes = Uint8Array.from(atob(content.rollouts.chunks[number]), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  })());
  return opened.get(number);
}

const FILTERS = {
  all: ["all prompts", () => true],
  mixed: ["different rewards", (g) => g.outcome === "mixed"],
  right: ["all right", (g) => g.outcome === "right"],
  wrong: ["all wrong", (g) => g.outcome === "wrong"],
  solved: ["newly solved", (g, run) => run.change && run.change.solved.some((p) => p.id === g.prompt_id)],
  lost: ["newly lost", (g, run) => run.change && run.change.lost.some((p) => p.id === g.prompt_id)],
  here: ["with rollouts in this file", (g, run, m) => where(m, g) !== undefined],
};

const where = (m, g) => content.rollouts.where[`${m.place}/${g.group}`];
const momentName = (m) => (m.kind === "step" ? `training step ${m.number}` : `evaluation ${when(m.number)}`);

function command(run, m, g) {
  const quote = (s) => (/^[\w@%+=:,./-]+$/.test(s) ? s : "'" + s.replaceAll("'", "'\\''") + "'");
  return `brorl rollouts ${quote(run.folder)} --${m.kind} ${m.number} --prompt ${quote(g.prompt_id)}`;
}

function rollouts(parent, run) {
  const data = content.rollouts, left = data.recorded.rollouts - data.held.rollouts;
  const recorded = run.spread.evaluation || run.spread.step;
  if (!data.moments.length) return append(parent, placeholder(recorded ? "This file has no space for rollouts. Make it larger with --megabytes." : "No rollouts are recorded."));
  append(parent, note(`This file has ${whole(data.held.rollouts)} rollouts of ${whole(data.held.groups)} groups, from ${data.moments.length} of ${data.moments_recorded} recorded steps and evaluations`,
    left > 0 ? `. It leaves out ${whole(left)} recorded ones: it has at most ${content.megabytes} MB and at most 16 rollouts of a group. Show all: ` : ". Show all: ",
    make("code", null, `brorl rollouts ${run.folder}`)));

  const order = data.moments.map((m, place) => ({ ...m, place }));
  const listed = [...order].sort((a, b) => (a.kind === b.kind ? a.number - b.number : a.kind < b.kind ? -1 : 1));
  let m = order[0], groups = [], rows = [], selected = -1, prompt = "", kept = "all";
  const list = make("ul", { class: "list", role: "listbox", tabindex: "0", "aria-label": "Prompts", id: "prompts-list" });
  const pane = make("div", { class: "pane" }), count = make("span", { role: "status", class: "note" });
  const search = make("input", { type: "search", id: "search", placeholder: "id or text of the prompt", on: { input: () => fill() } });
  const moments = choice("When", listed.map((x) => [String(x.place), momentName(x)]), String(m.place), (v) => { m = order[Number(v)]; load(); }, "moment");
  const filter = choice("Which", Object.entries(FILTERS).map(([k, [text]]) => [k, text]), "all", (v) => { kept = v; fill(); }, "filter");
  append(parent,
    make("div", { class: "controls" }, moments, filter, make("label", { for: "search" }, "Search ", search), count),
    make("div", { class: "browser" }, list, pane));

  async function load() {
    const asked = m, loaded = await chunk(m.list);
    if (m !== asked) return; // The user has chosen another moment in the meantime.
    groups = loaded;
    fill();
  }

  function fill() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean), [, passes] = FILTERS[kept];
    const all = groups.filter((g) => passes(g, run, m) && words.every((w) => `${g.prompt_id} ${g.excerpt || ""}`.toLowerCase().includes(w)));
    all.sort((a, b) => a.right / (a.rollouts || 1) - b.right / (b.rollouts || 1) || a.group - b.group); // hardest first
    rows = all.slice(0, MOST_LISTED);
    count.textContent = `${all.length} of ${groups.length} prompts` + (rows.length < all.length ? `, the first ${rows.length} are listed` : "");
    list.replaceChildren(...rows.map((g, i) => make("li", { role: "option", id: `option-${i}`, class: g.outcome, on: { click: () => select(i) } },
      make("span", { class: "of" }, `${g.right}/${g.rollouts}`), make("span", { class: "id" }, g.prompt_id),
      make("span", { class: "excerpt" }, g.excerpt === null ? "(prompt not recorded)" : g.excerpt))));
    if (!rows.length) {
      list.replaceChildren(make("li", { class: "none" }, "No prompt passes search and filter."));
      return pane.replaceChildren();
    }
    // Select the prompt that was shown before, or else one with different rewards.
    const again = rows.findIndex((g) => g.prompt_id === prompt), mixed = rows.findIndex((g) => where(m, g) !== undefined && g.outcome === "mixed");
    return select(again >= 0 ? again : mixed >= 0 ? mixed : Math.max(0, rows.findIndex((g) => where(m, g) !== undefined)));
  }

  async function select(i) {
    for (const option of list.querySelectorAll("[aria-selected]")) option.removeAttribute("aria-selected");
    selected = i;
    const option = list.children[i], g = rows[i], at = where(m, g);
    prompt = g.prompt_id;
    option.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", option.id);
    if (option.offsetTop < list.scrollTop || option.offsetTop + option.offsetHeight > list.scrollTop + list.clientHeight)
      list.scrollTop = option.offsetTop - list.clientHeight / 3; // Scroll only the list, not the page.
    const unit = at === undefined ? null : await chunk(at);
    if (rows[selected] === g) show(pane, run, m, g, unit);
  }

  list.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity, PageDown: 10, PageUp: -10 }[event.key];
    if (by === undefined || !rows.length) return;
    event.preventDefault();
    select(Math.min(Math.max(selected + by, 0), rows.length - 1));
  });
  openPrompt = (kind, number, id) => {
    m = order.find((x) => x.kind === kind && x.number === number) || m;
    [prompt, kept, search.value] = [id, "all", id]; // The list is limited, so search for the prompt.
    document.getElementById("moment").value = String(m.place);
    document.getElementById("filter").value = "all";
    load();
    document.getElementById("rollouts").scrollIntoView();
  };
  load();
}

function show(pane, run, m, g, unit) {
  pane.scrollTop = 0;
  const trained = m.kind === "step" ? (g.trained ? ", trained on" : ", not trained on") : "";
  const counts = `right ${g.right} of ${g.rollouts}, mean reward ${short(g.reward)}, ${g.distinct} distinct answers, ${g.tokens === null ? "-" : g.tokens.toFixed(1)} tokens on average`;
  const head = [make("h3", null, g.prompt_id), make("p", null, `${momentName(m)}: ${counts}${trained}; task ${g.task}`)];
  const rest = make("code", null, command(run, m, g));
  if (!unit && g.excerpt === null) return pane.replaceChildren(...head, placeholder("The rollouts of this group are not recorded (run.record_groups)."));
  if (!unit) return pane.replaceChildren(...head, placeholder("Its rollouts are not in this file. Show them:"), rest);
  return pane.replaceChildren(...head,
    make("pre", { class: "text" }, unit.prompt),
    unit.reference === null ? "" : make("p", null, "Reference answer: ", make("code", null, unit.reference)),
    answers(unit.rollouts),
    unit.rollouts.length < g.rollouts ? note(`${unit.rollouts.length} of its ${g.rollouts} rollouts are in this file. Show all that are recorded: `, rest) : "",
    make("div", { class: "cards" }, unit.rollouts.map(card)));
}

function answers(siblings) {
  const counts = new Map();
  for (const r of siblings) {
    const key = JSON.stringify([r.answer, r.right]);
    counts.set(key, (counts.get(key) || 0) + 1);
  }
  const rows = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 8).map(([key, n]) => [...JSON.parse(key), n]);
  return make("ul", { class: "answers" }, rows.map(([answer, right, n]) => make("li", null,
    `${n} x `, make("code", null, answer === null ? "(no answer)" : answer.length > 60 ? answer.slice(0, 60) + "..." : answer), right ? " right" : " wrong")));
}

function card(r) {
  const facts = [`reward ${short(r.reward)}`, `sibling ${r.sibling}`, `${r.tokens} tokens`, r.finish === "length" ? "cut off" : "ended by itself"];
  if (r.turns) facts.splice(3, 0, `${r.turns.filter((t) => t.sampled).length} turns`);
  if (r.advantage !== null) facts.push(`advantage ${r.advantage > 0 ? "+" : ""}${r.advantage.toFixed(2)}`);
  if (r.status && r.status !== "ok") facts.push(r.status);
  for (const [name, value] of r.parts) facts.push(`${name} ${short(value)}`);
  return make("article", { class: "card " + (r.right ? "right" : "wrong") },
    make("p", { class: "facts" }, make("b", null, r.right ? "\u2713 right" : "\u2717 wrong"), ", " + facts.join(", ")),
    r.reason ? make("p", { class: "reason" }, "Reason: " + r.reason) : null,
    r.turns ? sequences(r.turns) : make("pre", { class: "text" }, r.text));
}

// The sequences of an agent's rollout are next to one another.
function sequences(turns) {
  const columns = [];
  for (const t of turns) (columns[t.sequence] ||= []).push(turn(t));
  return columns.length === 1 ? columns[0] : make("div", { class: "sequences" }, columns.map((c) => make("div", null, c)));
}

function turn(t) {
  return make("pre", { class: t.sampled ? "text" : "text observation", "aria-label": t.sampled ? "Turn of the model" : "Observation" }, t.text);
}

// Build the page from its sections.

const content = JSON.parse(document.getElementById("content").textContent);

const SINGLE = [
  ["verdict", "Verdict", verdict],
  ["curves", "Curves", curves],
  ["spent", "Checkpoints", spent],
  ["prompts", "Prompts", prompts],
  ["rollouts", "Rollouts", rollouts],
  ["configuration", "Configuration", configuration],
];
const SEVERAL = [["comparison", "Comparison", comparison], ["spent", "Checkpoints", spent_by_several]];

const several = content.runs.length > 1;
for (const [id, heading, draws] of several ? SEVERAL : SINGLE) {
  const section = make("section", { id, "aria-labelledby": id + "-heading" }, make("h2", { id: id + "-heading" }, heading));
  document.getElementById("main").append(section);
  document.getElementById("contents").append(make("a", { href: "#" + id }, heading));
  draws(section, several ? content : content.runs[0]);
}
document.getElementById("about").textContent = `Made ${content.made} by megatron-brorl ${content.version}. This file fetches nothing.`;
