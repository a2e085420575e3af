"use strict";
// What came of it, the curves, the configuration, and several runs beside one another.

const MARK = { good: "\u25b2", bad: "\u25bc", unclear: "\u25cf" }; // a form for each, for colour alone is not seen by all

function verdict(parent, run) {
  const v = run.verdict;
  append(parent, [
    make("div", { class: "verdict " + v.tone },
      make("p", { class: "headline" }, make("span", { "aria-hidden": "true" }, MARK[v.tone] + " "), v.headline),
      v.details.map((sentence) => make("p", null, sentence)),
      v.findings.map((sentence) => make("p", { class: "finding" }, make("b", null, "Warning: "), sentence))),
    make("dl", { class: "tiles" }, tiles(run).map(([name, value]) => make("div", null, make("dt", null, name), make("dd", null, value)))),
  ]);
  if (run.missing.evaluation) append(parent, [said(run.missing.evaluation)]);
  if (run.change || run.evaluations.length) append(parent, [passes(run)]);
  if (run.change)
    append(parent, [make("div", { class: "columns" },
      moved("Newly solved", run.change.solved, `No sample right ${when(run.change.from)}, some ${when(run.change.to)}`, run.change.to),
      moved("Newly lost", run.change.lost, `Some samples right ${when(run.change.from)}, none ${when(run.change.to)}`, run.change.from))]);
}

function tiles(run) {
  const last = run.evaluations[run.evaluations.length - 1];
  return [
    ["state", run.verdict.state],
    run.n ? ["rollouts per prompt", String(run.n)] : null,
    last && last.prompts ? ["held-out prompts", `${last.prompts}, ${last.samples} samples each`] : null,
    run.memory_mib ? ["peak memory", (run.memory_mib / 1024).toFixed(1) + " GiB, all processes"] : null,
  ].filter(Boolean);
}

function when(steps) {
  return steps ? `after ${steps} step${steps === 1 ? "" : "s"}` : "before training";
}

function interval(p) {
  if (!p) return "-";
  return p.low === undefined ? percent(p.mean) : `${percent(p.mean)} (${percent(p.low)} to ${percent(p.high)})`;
}

function numbers(r) {
  if (!r) return "-";
  return r.low === undefined ? short(r.mean) : `${short(r.mean)} (${short(r.low)} to ${short(r.high)})`;
}

function passes(run) {
  const first = run.evaluations[0], last = run.evaluations[run.evaluations.length - 1];
  const change = new Map((run.change ? run.change.passes : []).map((p) => [p.k, p.difference]));
  const of = (e, k) => e.passes.find((p) => p.k === k);
  const rows = first.passes.map((p) => {
    const d = change.get(p.k);
    return [`pass@${p.k}`, interval(p), first === last ? "-" : interval(of(last, p.k)),
      d ? `${points(d.mean)} (${points(d.low)} to ${points(d.high)})` : "-", d ? (d.p < 1e-4 ? "< 0.0001" : d.p.toFixed(4)) : "-"];
  });
  if (first.reward || last.reward) {
    const d = run.change && run.change.reward && run.change.reward.difference;
    rows.push(["mean reward", numbers(first.reward), first === last ? "-" : numbers(last.reward),
      d ? numbers(d) : "-", d ? (d.p < 1e-4 ? "< 0.0001" : d.p.toFixed(4)) : "-"]);
  }
  const head = ["", when(first.steps), first === last ? "later" : when(last.steps), "change, points", "p"];
  return make("div", null,
    table(head, rows, { label: "pass@k before and after" }),
    make("p", { class: "note" }, "In brackets 95% intervals of the bootstrap over prompts; the change is paired by prompt, p is of Student's two-tailed paired test. They do not say how runs of other seeds differ."));
}

function moved(title, rows, note, steps) {
  const list = rows.map((row) => make("li", null,
    make("button", { type: "button", class: "link", on: { click: () => openPrompt("evaluation", steps, row.id) } }, row.id),
    ` ${row.right} of ${row.samples}`));
  return make("details", { class: "moved", open: rows.length <= 100 },
    make("summary", null, `${title}: ${rows.length}`),
    make("p", { class: "note" }, note + "."), rows.length ? make("ul", null, list) : said("No prompt."));
}

function held_out(run) {
  const es = run.evaluations;
  const steps = es.map((e) => e.steps);
  const ks = [...new Set(es.flatMap((e) => e.passes.map((p) => p.k)))].sort((a, b) => a - b);
  const some = ks.length <= 4 ? ks : [ks[0], ks[Math.floor(ks.length / 3)], ks[Math.floor((2 * ks.length) / 3)], ks[ks.length - 1]];
  const get = (e, k, key) => { const p = e.passes.find((x) => x.k === k); return p && p[key] !== undefined ? p[key] : null; };
  const series = some.map((k) => ({ name: `pass@${k}`, x: steps, y: es.map((e) => get(e, k, "mean")),
    low: es.map((e) => get(e, k, "low")), high: es.map((e) => get(e, k, "high")) }));
  const tasks = [...new Set(es.flatMap((e) => Object.keys(e.tasks)))];
  const by = tasks.map((t) => ({ name: t, x: steps, y: es.map((e) => (t in e.tasks ? e.tasks[t] : null)) }));
  return [
    lines("Held-out accuracy", "Bands: 95% intervals over prompts.", series, { y: "pass@k", format: ".0%", points: true }),
    tasks.length > 1 ? lines("Held-out pass@1 by task", "", by, { y: "pass@1", format: ".0%", points: true }) : null,
  ];
}

const PHASES = ["generate", "score", "exchange", "train", "refit"];

function phases(c) {
  const steps = c.values["time/step"];
  if (!steps) return null;
  const rows = [];
  c.step.forEach((x, i) => {
    if (steps[i] === null) return;
    let rest = steps[i];
    const add = (name, y) => rows.push({ step: x, x: x - c.every + 0.5, x2: x + 0.5, name, y });
    for (const name of PHASES) {
      const seconds = (c.values["time/" + name] || [])[i] || 0;
      rest -= seconds;
      add(name, seconds);
    }
    add("other", Math.max(rest, 0));
  });
  return stacked("Time per step", "What no phase accounts for is other.", rows, [...PHASES, "other"], { y: "seconds", step: c.every });
}

function curves(parent, run) {
  const c = run.curves;
  if (run.missing.curves) append(parent, [said(run.missing.curves)]);
  const of = (name, label) => ({ name: label, x: c.step, y: c.values[name] || [] });
  const one = (title, note, name, options) => lines(title, note, [of(name, title)], { smooth: true, ...options });
  const made = [
    ...held_out(run),
    one("Training reward", "", "reward", { y: "mean reward" }),
    run.by_task && Object.keys(run.by_task.tasks).length > 1 ? lines("Right rollouts by task", "Of training.",
      Object.entries(run.by_task.tasks).map(([name, y]) => ({ name, x: run.by_task.step, y })), { y: "share right", format: ".0%", smooth: true }) : null,
    lines("Groups of a step", "Kept: with right and wrong rollouts, or all where there is no dynamic sampling.",
      [of("kept_share", "kept"), of("all_right_share", "all right"), of("all_wrong_share", "all wrong")], { y: "share of groups", format: ".0%" }),
    one("Response length", "", "response_tokens", { y: "mean tokens" }),
    phases(c),
    lines("Engine against trainer", "How far their log-probs of the same tokens are apart. A log scale has no 0.",
      [of("logprob_gap_max", "largest"), of("logprob_gap_mean", "mean")], { y: "nats", log: true, format: ".1e" }),
    one("Entropy of the policy", "", "entropy", { y: "nats per token" }),
    one("Gradient norm", "Before clipping.", "grad_norm", { y: "norm" }),
    lines("Responses", "Cut off at rollout.max_tokens, and with an answer that the verifier found.",
      [of("answered_share", "with an answer"), of("cut_off_share", "cut off")], { y: "share of rollouts", format: ".0%" }),
    lines("Clipped tokens", "Importance ratio beyond its bounds.", [of("clipped_low", "below"), of("clipped_high", "above")],
      { y: "share of tokens", format: ".1~%" }),
  ];
  append(parent, [make("div", { class: "charts" }, made)]);
  if (c.every > 1) append(parent, [said(`Each point of a curve is the mean of ${c.every} steps; metrics.jsonl has every one.`)]);
  if (Object.keys(c.values).length) append(parent, [any_figure(run)]);
}

function meaning(name) {
  const m = content.meanings[name];
  if (!m) return "";
  return [m.meaning, m.bad, m.unit && m.unit !== "1" ? `Unit: ${m.unit}.` : ""].filter(Boolean).map((s) => s.replaceAll("`", "")).map((s) => s[0].toUpperCase() + s.slice(1))
    .map((s) => (/[.!?]$/.test(s) ? s : s + ".")).join(" ");
}

function any_figure(run) {
  const names = Object.keys(run.curves.values).sort();
  const place = make("div", { class: "charts" });
  const field = make("input", { list: "figures", id: "figure", value: names.includes(state.figure) ? state.figure : names[0], autocomplete: "off" });
  const show = () => {
    if (!(field.value in run.curves.values)) return;
    state.figure = field.value;
    forget(place);
    place.replaceChildren(lines(field.value, meaning(field.value), [{ name: field.value, x: run.curves.step, y: run.curves.values[field.value] }],
      { y: "", smooth: true }) || said("This figure has no value."));
    drawNear(place);
  };
  field.addEventListener("input", show);
  field.addEventListener("focus", () => field.select());
  const box = make("div", { class: "any" },
    make("label", { for: "figure" }, `Any of the ${names.length} figures of metrics.jsonl: `), field,
    make("datalist", { id: "figures" }, names.map((n) => make("option", { value: n }))), place);
  queueMicrotask(show);
  return box;
}

// The keys that a resumed run changed, with both values.
function changed(start) {
  const one = ([key, [before, now]]) => `; ${key} = ${JSON.stringify(before)} -> ${JSON.stringify(now)}`;
  return Object.entries(start.changes || {}).map(one).join("");
}

function configuration(parent, run) {
  const start = run.starts[run.starts.length - 1];
  for (const key of ["config", "starts"]) if (run.missing[key]) append(parent, [said(run.missing[key])]);
  append(parent, [make("p", null, make("b", null, "Folder: "), make("code", null, run.folder))]);
  if (start) {
    const versions = Object.entries(start.versions).map(([name, version]) => `${name} ${version}`).join(", ");
    append(parent, [
      make("p", null, make("b", null, "Command: "), make("code", null, start.command)),
      table(["", ""], [
        ["started", run.starts.map((s) => s.time + (s.step ? ` (resumed after ${s.step} steps${changed(s)})` : "")).join(", ")],
        ["ranks", String(start.ranks)],
        ["machine", `${start.machine.system}, ${start.machine.cores} cores, ${start.machine.device}`],
        ["versions", versions],
      ], { label: "Environment" }),
    ]);
  }
  const keys = Object.entries(run.config);
  if (!keys.length) return;
  const place = make("div"), count = make("span", { role: "status" });
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/);
    const found = keys.filter(([k, v]) => words.every((w) => (k + " " + JSON.stringify(v)).toLowerCase().includes(w)));
    count.textContent = ` ${found.length} of ${keys.length} keys`;
    place.replaceChildren(table(["key", "value"], found.map(([k, v]) => [k, JSON.stringify(v)]), { label: "Configuration" }));
  };
  const field = make("input", { type: "search", id: "keys", placeholder: "rollout, lr, 512 ...", on: { input: show } });
  append(parent, [make("p", null, make("label", { for: "keys" }, "Search keys and values: "), field, count), place]);
  show();
}

// Of several runs -----------------------------------------------------------------------------------------------------

function elapsed(run, steps) {
  let seconds = 0;
  run.curves.step.forEach((s, i) => { if (s < steps) seconds = run.curves.elapsed[i]; });
  return seconds;
}

function comparison(parent, content) {
  const runs = content.runs;
  const finals = runs.map((run) => {
    const first = run.evaluations[0], last = run.evaluations[run.evaluations.length - 1];
    const d = run.change && run.change.passes[0], wide = run.change && run.change.passes[run.change.passes.length - 1];
    const gap = (p) => (p ? `${points(p.difference.mean)} (${points(p.difference.low)} to ${points(p.difference.high)})` : "-");
    return [run.name, run.verdict.state, run.n ? String(run.n) : "-", duration(run.seconds || elapsed(run, run.steps)),
      first ? interval(first.passes[0]) : "-", last && last !== first ? interval(last.passes[0]) : "-", gap(d),
      wide && wide !== d ? `pass@${wide.k}: ${gap(wide)}` : "-",
      run.change ? `+${run.change.solved.length} / -${run.change.lost.length}` : "-"];
  });
  append(parent, [
    table(["run", "state", "N", "time", "pass@1 first", "pass@1 last", "change, points", "largest k", "prompts solved / lost"], finals, { label: "Finals" }),
    make("p", { class: "note" }, "In brackets 95% intervals over prompts; changes are within each run, paired by prompt."),
    runs.map((run) => [run.verdict.headline, ...run.verdict.findings].map((s, i) => make("p", { class: i ? "finding" : null }, make("b", null, run.name + ": "), s))),
  ]);
  versus(parent, content);
  const ks = [...new Set(runs.flatMap((run) => run.evaluations.flatMap((e) => e.passes.map((p) => p.k))))].sort((a, b) => a - b);
  const figures = [...new Set(runs.flatMap((run) => Object.keys(run.curves.values)))].sort();
  const tasks = [...new Set(runs.flatMap((run) => run.evaluations.flatMap((e) => Object.keys(e.tasks))))].sort();
  const by = tasks.length > 1 ? tasks.map((t) => [`pass@1 of ${t}`, `held-out pass@1 of ${t}`]) : [];
  const choices = [...ks.map((k) => [`pass@${k}`, `held-out pass@${k}`]), ...by, ...figures.map((f) => [f, f])];
  const place = make("div", { class: "charts" });
  const show = (name) => {
    state.compared = name;
    forget(place);
    const charts = [["training step", false], ["seconds of training steps", true]].map(([x, over]) =>
      lines(`${name} over ${over ? "time" : "steps"}`, over ? "Evaluations take no time here." : meaning(name), runs.map((run) => of_run(run, name, over)),
        { y: name, x, smooth: !name.startsWith("pass@"), format: name.startsWith("pass@") ? ".0%" : ".3~g", whole: !over }));
    place.replaceChildren(...charts.map((c) => c || said("No run has this figure.")));
    drawNear(place);
  };
  const begin = choices.some(([n]) => n === state.compared) ? state.compared : (choices[0] || [""])[0];
  if (choices.length) {
    append(parent, [make("p", null, choice("Figure", choices, begin, show, "compared")), place]);
    queueMicrotask(() => show(begin));
  } else append(parent, [said("No step is done in any of these runs.")]);
  differences(parent, runs);
}

function versus(parent, content) {
  const first = content.runs[0].name;
  append(parent, [make("h3", null, `Last evaluations against that of ${first}, prompt by prompt`)]);
  const rows = content.runs.slice(1).flatMap((run, i) => {
    const c = content.against[i + 1];
    return c ? c.passes.map((p) => [run.name, `pass@${p.k}`, percent(p.before), percent(p.after),
      `${points(p.difference.mean)} (${points(p.difference.low)} to ${points(p.difference.high)})`,
      p.difference.p < 1e-4 ? "< 0.0001" : p.difference.p.toFixed(4), String(c.prompts), `+${c.solved.length} / -${c.lost.length}`]) : [];
  });
  const alone = content.runs.slice(1).filter((_, i) => !content.against[i + 1]).map((run) => run.name);
  if (rows.length) append(parent, [table(["run", "", first, "this run", "difference, points", "p", "prompts of both", "solved / lost"], rows, { label: "Paired differences" })]);
  if (alone.length) append(parent, [said(`No pairs: ${alone.join(", ")} and ${first} have no two recorded held-out prompts in common.`)]);
}

function of_run(run, name, over) {
  if (name.startsWith("pass@1 of ")) {
    const task = name.slice(10), es = run.evaluations.filter((e) => task in e.tasks);
    return { name: run.name, x: es.map((e) => (over ? elapsed(run, e.steps) : e.steps)), y: es.map((e) => e.tasks[task]) };
  }
  if (name.startsWith("pass@")) {
    const k = Number(name.slice(5));
    const es = run.evaluations.map((e) => [e.steps, e.passes.find((p) => p.k === k)]).filter(([, p]) => p);
    return { name: run.name, x: es.map(([s]) => (over ? elapsed(run, s) : s)), y: es.map(([, p]) => p.mean),
      low: es.map(([, p]) => (p.low === undefined ? null : p.low)), high: es.map(([, p]) => (p.high === undefined ? null : p.high)) };
  }
  return { name: run.name, x: over ? run.curves.elapsed : run.curves.step, y: run.curves.values[name] || [] };
}

function differences(parent, runs) {
  const known = runs.filter((run) => Object.keys(run.config).length);
  append(parent, [make("h3", null, "Keys that differ")]);
  if (known.length < 2) return append(parent, [said("The configuration of fewer than two of these runs is recorded.")]);
  const keys = [...new Set(known.flatMap((run) => Object.keys(run.config)))].sort();
  const text = (run, k) => (k in run.config ? JSON.stringify(run.config[k]) : "-");
  const rows = keys.filter((k) => new Set(known.map((run) => text(run, k))).size > 1).map((k) => [k, ...known.map((run) => text(run, k))]);
  append(parent, [rows.length ? table(["key", ...known.map((run) => run.name)], rows, { label: "Keys that differ" }) : said("None: their configurations are the same.")]);
}
