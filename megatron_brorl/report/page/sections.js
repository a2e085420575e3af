"use strict";
// Verdict, curves, checkpoints, prompts, configuration, and the comparison of several runs.

const MARK = { good: "\u25b2", bad: "\u25bc", unclear: "\u25cf" }; // Shapes help colour-blind readers.

function verdict(parent, run) {
  const v = run.verdict, last = last_of(run.evaluations), c = run.change;
  const tiles = [
    ["state", v.state],
    ["rollouts per prompt", run.n],
    ["held-out prompts", last && last.prompts && `${last.prompts}, ${last.samples} samples each`],
    ["peak memory", run.memory_mib && (run.memory_mib / 1024).toFixed(1) + " GiB, all processes"],
  ].filter(([, value]) => value);
  append(parent,
    make("div", { class: "verdict " + v.tone },
      make("p", { class: "headline" }, make("span", { "aria-hidden": "true" }, MARK[v.tone] + " "), v.headline),
      v.details.map((sentence) => make("p", null, sentence)),
      v.findings.map((sentence) => make("p", { class: "finding" }, make("b", null, "Warning: "), sentence))),
    make("dl", { class: "tiles" }, tiles.map(([name, value]) => make("div", null, make("dt", null, name), make("dd", null, value)))));
  append(parent, run.evaluations.length ? passes(run) : placeholder("There is no held-out evaluation. Set data.held_out."));
  if (c)
    append(parent, make("div", { class: "columns" },
      moved("Newly solved", c.solved, `No sample was right ${when(c.from)}, at least one ${when(c.to)}.`, c.to),
      moved("Newly lost", c.lost, `At least one sample was right ${when(c.from)}, none ${when(c.to)}.`, c.from)));
}

function passes(run) {
  const first = run.evaluations[0], last = run.evaluations.length > 1 ? last_of(run.evaluations) : null;
  const change = new Map((run.change ? run.change.passes : []).map((p) => [p.k, p.difference]));
  const row = (name, a, b, d, form, gap) => [name, interval(a, form), interval(b, form), d ? interval(d, gap) : "-", d ? of_p(d.p) : "-"];
  const rows = first.passes.map((p) => row(`pass@${p.k}`, p, last && last.passes.find((q) => q.k === p.k), change.get(p.k), percent, points));
  if (first.reward || (last && last.reward)) {
    const d = run.change && run.change.reward && run.change.reward.difference;
    rows.push(row("mean reward", first.reward || first.passes[0], last && (last.reward || last.passes[0]), d, short, signed));
  }
  const tasks = run.change && run.change.tasks.length > 1 ? run.change.tasks : [];
  const of_tasks = tasks.map((t) => [t.task, t.prompts, interval(first.tasks[t.task]), interval(last.tasks[t.task]), interval(t.difference, points), of_p(t.difference.p)]);
  const times = [when(first.steps), last ? when(last.steps) : "later", "change", "p"];
  return [table("pass@k before and after", ["", ...times], rows),
    tasks.length ? table("pass@1 by task before and after", ["pass@1 by task", "prompts", ...times], of_tasks) : null,
    note("In brackets: 95% bootstrap intervals over prompts. The change (of pass@k in points) is paired by prompt; p is that of Student's two-tailed paired test. Neither covers differences between seeds.")];
}

function moved(title, rows, text, steps) {
  const list = rows.map((row) => make("li", null,
    make("button", { type: "button", class: "link", on: { click: () => openPrompt("evaluation", steps, row.id) } }, row.id), ` ${row.right} of ${row.samples}`));
  return make("details", { class: "moved", open: rows.length <= 100 }, make("summary", null, `${title}: ${rows.length}`), note(text),
    rows.length ? make("ul", null, list) : placeholder("No prompt."));
}

function held_out(run) {
  const es = run.evaluations;
  const ks = [...new Set(es.flatMap((e) => e.passes.map((p) => p.k)))].sort((a, b) => a - b);
  const some = ks.length <= 4 ? ks : [ks[0], ks[Math.floor(ks.length / 3)], ks[Math.floor((2 * ks.length) / 3)], last_of(ks)];
  const tasks = [...new Set(es.flatMap((e) => Object.keys(e.tasks)))];
  const reward = es.some((e) => e.reward) && lines("Held-out mean reward", "Band: 95% interval over prompts.", [of_run(run, REWARD, "mean reward")], { y: "mean reward", points: true });
  if (reward && !es.some((e) => e.passes.some((p) => p.mean > 0))) return [reward]; // pass@k is 0 throughout.
  return [
    lines("Held-out accuracy", "Bands: 95% intervals over prompts.", some.map((k) => of_run(run, `pass@${k}`, `pass@${k}`)), { y: "pass@k", format: ".0%", points: true }),
    reward,
    tasks.length > 1 ? lines("Held-out pass@1 by task", "Bands: 95% intervals over prompts.", tasks.map((t) => of_run(run, `pass@1 of ${t}`, t)), { y: "pass@1", format: ".0%", points: true }) : null,
  ];
}

const REWARD = "held-out mean reward"; // in the list of metrics
const PHASES = ["generate", "score", "exchange", "train", "weight_sync"];

function phases(c) {
  const steps = c.values["time/step"];
  if (!steps) return null;
  const rows = c.step.flatMap((x, i) => {
    const own = PHASES.map((name) => ({ x, name, y: (c.values["time/" + name] || [])[i] || 0 }));
    const known = own.reduce((sum, r) => sum + r.y, 0);
    return steps[i] === null ? [] : [...own, { x, name: "other", y: Math.max(steps[i] - known, 0) }];
  });
  return stacked("Time per step", "", rows, [...PHASES, "other"], "seconds");
}

function curves(parent, run) {
  const c = run.curves, tasks = Object.entries(run.by_task.tasks);
  const of = (name, label) => ({ name: label, x: c.step, y: c.values[name] || [] });
  const never = (c.values.all_wrong_share || []).every((v) => v === null || v === 1) && (c.values.kept_share || []).some((v) => v > 0);
  const one = (title, text, name, y) => lines(title, text, [of(name, title)], { smooth: true, y });
  append(parent, c.step.length ? null : placeholder("No step is finished yet."), make("div", { class: "charts" },
    held_out(run),
    one("Training reward", "", "reward", "mean reward"),
    tasks.length > 1 ? lines("Right rollouts by task", "In training.", tasks.map(([name, y]) => ({ name, x: run.by_task.step, y })),
      { y: "share right", format: ".0%", smooth: true }) : null,
    lines("Groups of a step", "Kept: groups with different rewards; all groups without dynamic sampling." + (never ? " No rollout reached reward.correct_at." : ""),
      [of("kept_share", "kept"), ...(never ? [] : [of("all_right_share", "all right"), of("all_wrong_share", "none right")])], { y: "share of groups", format: ".0%" }),
    one("Response length", "", "response_tokens", "mean tokens"),
    phases(c),
    lines("Engine against trainer", "Difference of their log-probs of the same tokens. The log scale does not show 0.",
      [of("logprob_gap_max", "largest"), of("logprob_gap_mean", "mean")], { y: "nats", log: true, format: ".1e" }),
    one("Entropy of the policy", "", "entropy", "nats per token"),
    one("Gradient norm", "Before clipping.", "grad_norm", "norm"),
    lines("Responses", "Responses cut off at rollout.max_tokens, and responses with an answer.",
      [of("answered_share", "with an answer"), of("cut_off_share", "cut off")], { y: "share of rollouts", format: ".0%" }),
    lines("Clipped tokens", "Tokens with an importance ratio outside its bounds.", [of("clipped_low", "below"), of("clipped_high", "above")], { y: "share of tokens", format: ".1~%" })));
  if (c.every > 1) append(parent, placeholder(`Each point of a curve is the mean of ${c.every} steps. metrics.jsonl has every step.`));
  any_metric(parent, [run], Object.keys(c.values).sort(), "reward");
}

function meaning(name) {
  const m = content.meanings[name];
  if (!m) return "";
  const sentences = [m.meaning, m.bad, m.unit && m.unit !== "1" ? `unit: ${m.unit}` : ""].filter(Boolean).map((s) => s.replaceAll("`", ""));
  return sentences.map((s) => s[0].toUpperCase() + s.slice(1) + (/[.!?]$/.test(s) ? "" : ".")).join(" ");
}

// Add a field to choose a metric by name, and its charts: over steps, and for several runs also over time.
function any_metric(parent, runs, names, begin) {
  if (!names.length) return;
  const place = make("div", { class: "charts" });
  const show = () => {
    const name = field.value, share = name.startsWith("pass@"), held = share || name === REWARD;
    if (!names.includes(name)) return;
    const ways = runs.length > 1 ? [["training step", false], ["seconds of training steps", true]] : [["training step", false]];
    const draw = ([x, over]) => lines(over ? `${name} over time` : name, over ? "The time of evaluations is not included." : meaning(name),
      runs.map((run) => of_run(run, name, run.name, over)), { y: "", x, smooth: !held, format: share ? ".0%" : ".3~g", whole: !over });
    place.replaceChildren(...ways.map((way) => draw(way) || placeholder("This metric has no value.")));
  };
  const field = make("input", { list: "metrics", id: "metric", value: names.includes(begin) ? begin : names[0], autocomplete: "off", on: { input: show, focus: () => field.select() } });
  append(parent, make("div", { class: "any" }, make("label", { for: "metric" }, `Any of the ${names.length} metrics: `), field,
    make("datalist", { id: "metrics" }, names.map((n) => make("option", { value: n }))), place));
  show();
}

// Return a metric, pass@K, pass@1 of a task, or the held-out mean reward as a series for `lines`. over: seconds instead of steps.
function of_run(run, name, label, over) {
  if (!name.startsWith("pass@") && name !== REWARD) return { name: label, x: over ? run.curves.elapsed : run.curves.step, y: run.curves.values[name] || [] };
  const task = name.startsWith("pass@1 of ") ? name.slice(10) : null;
  const of_k = (e) => e.passes.find((p) => p.k === Number(name.slice(5)));
  const value = (e) => (name === REWARD ? e.reward || e.passes[0] : task === null ? of_k(e) : e.tasks[task]);
  const values = run.evaluations.map((e) => [e.steps, value(e)]).filter(([, p]) => p);
  const end = (key) => (values.some(([, p]) => key in p) ? values.map(([, p]) => (key in p ? p[key] : null)) : undefined);
  return { name: label, x: values.map(([s]) => (over ? elapsed(run, s) : s)), y: values.map(([, p]) => p.mean), low: end("low"), high: end("high") };
}

function elapsed(run, steps) {
  let seconds = 0;
  run.curves.step.forEach((s, i) => { if (s <= steps) seconds = run.curves.elapsed[i]; });
  return seconds;
}

function at_checkpoints(run) {
  if (!run.checkpoints.length) return placeholder("No evaluation yet.");
  const ks = [...new Set(run.checkpoints.flatMap((row) => row.passes.map((p) => p.k)))].sort((a, b) => a - b);
  const shown = [...new Set([ks[0], last_of(ks)])];
  const rows = run.checkpoints.map((row) => [row.steps, duration(row.seconds), whole(row.rollouts), whole(row.kept),
    ...shown.map((k) => interval(row.passes.find((p) => p.k === k))), ...(row.reward ? [interval(row.reward, short)] : [])]);
  const graded = run.checkpoints[0].reward ? ["mean reward"] : [];
  return table(`Checkpoints of ${run.name}`, ["steps", "time of steps", "rollouts", "trained on", ...shown.map((k) => `pass@${k}`), ...graded], rows);
}

function sampling(runs) {
  const rows = runs.filter((run) => run.generation).map((run) => {
    const g = run.generation;
    return [run.name, run.n || "-", short(g.rollouts_per_s), short(g.tokens_per_s), percent(g.share_of_step),
      short(g.end_to_end_per_s), short(g.kept_per_s), percent(g.prompt_hits)];
  });
  return [make("h3", null, "Generation"), rows.length ? [
    table("Generation", ["run", "N", "rollouts/s", "tokens/s", "share of a step", "rollouts/s, whole steps", "trained on/s, whole steps", "prompt cache hits"], rows),
    note("The first two are per second of sampling, over all devices. Prompt cache hits: share of prompt tokens that were already in the cache."),
  ] : placeholder("No step has sampled rollouts yet.")];
}

function spent(parent, run) {
  append(parent, at_checkpoints(run), sampling([run]));
}

function spent_by_several(parent, content) {
  const runs = content.runs;
  const rows = content.time_to.flatMap((to, i) => (to ? [[runs[i].name, percent(to.target),
    ...to.runs.map((r) => (r ? `${duration(r.seconds)}, ${whole(r.rollouts)} rollouts` : "never"))]] : []));
  append(parent, runs.map((run) => [make("h3", null, run.name), at_checkpoints(run)]), make("h3", null, "Time to a target"), rows.length ? [
    table("Time to a target", ["end of", "pass@1", ...runs.map((run) => run.name)], rows),
    note("Time of steps until each run first reached the final pass@1 of one run, interpolated between evaluations. Noise can make a run look early."),
  ] : placeholder("No run has an evaluation yet."), sampling(runs));
}

function configuration(parent, run) {
  const start = last_of(run.starts), code = (text) => make("code", null, text);
  append(parent, make("p", null, make("b", null, "Folder: "), code(run.folder)));
  if (start) {
    const changed = (s) => Object.entries(s.changes || {}).map(([key, [a, b]]) => `; ${key} = ${JSON.stringify(a)} -> ${JSON.stringify(b)}`).join("");
    append(parent, make("p", null, make("b", null, "Command: "), code(start.command)), table("Environment", ["", ""], [
      ["started", run.starts.map((s) => s.time + (s.step ? ` (resumed ${when(s.step)}${changed(s)})` : "")).join(", ")],
      ["ranks", start.ranks],
      ["machine", `${start.machine.system}, ${start.machine.cores} cores, ${start.machine.device}`],
      ["versions", Object.entries(start.versions).map(([name, version]) => `${name} ${version}`).join(", ")],
    ]));
  }
  const keys = Object.entries(run.config), place = make("div"), count = make("span", { role: "status" });
  if (!keys.length) return append(parent, placeholder("The configuration is not recorded."));
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/);
    const matches = keys.filter(([k, v]) => words.every((w) => (k + " " + JSON.stringify(v)).toLowerCase().includes(w)));
    count.textContent = ` ${matches.length} of ${keys.length} keys`;
    place.replaceChildren(table("Configuration", ["key", "value"], matches.map(([k, v]) => [k, JSON.stringify(v)])));
  };
  const field = make("input", { type: "search", id: "keys", placeholder: "rollout, lr, 512 ...", on: { input: show } });
  append(parent, make("p", null, make("label", { for: "keys" }, "Search keys and values: "), field, count), place);
  show();
}

const solved = (change) => (change ? `+${change.solved.length} / -${change.lost.length}` : "-");

function comparison(parent, content) {
  const runs = content.runs, first = runs[0];
  const finals = runs.map((run) => {
    const [a, b] = [run.evaluations[0], last_of(run.evaluations)], c = run.change, wide = c && c.passes.length > 1 && last_of(c.passes);
    return [
      run.name, run.verdict.state, run.n || "-", duration(run.seconds || elapsed(run, run.steps)),
      interval(a && a.passes[0]), interval(b && b !== a && b.passes[0]),
      c ? interval(c.passes[0].difference, points) : "-",
      wide ? `pass@${wide.k}: ${interval(wide.difference, points)}` : "-",
      solved(c),
    ];
  });
  append(parent,
    table("Results", ["run", "state", "N", "time", "pass@1 first", "pass@1 last", "change, points", "largest k", "prompts solved / lost"], finals),
    note("In brackets: 95% intervals over prompts. Changes are within each run, paired by prompt."),
    runs.map((run) => [run.verdict.headline, ...run.verdict.findings].map((s) => make("p", null, make("b", null, run.name + ": "), s))),
    make("h3", null, `Last evaluations against that of ${first.name}, prompt by prompt`));
  const rows = runs.slice(1).flatMap((run, i) => {
    const c = content.against[i + 1];
    const row = (name, p, form, gap) => [run.name, name, form(p.before), form(p.after), interval(p.difference, gap), of_p(p.difference.p), c.prompts, solved(c)];
    return c ? [...c.passes.map((p) => row(`pass@${p.k}`, p, percent, points)), ...(c.reward ? [row("mean reward", c.reward, short, signed)] : [])] : [];
  });
  const alone = runs.slice(1).filter((_, i) => !content.against[i + 1]).map((run) => run.name);
  if (rows.length) append(parent, table("Paired differences", ["run", "", first.name, "this run", "difference (of pass@k in points)", "p", "prompts of both", "solved / lost"], rows));
  if (alone.length) append(parent, placeholder(`${alone.join(", ")} and ${first.name} cannot be paired: they have fewer than two recorded held-out prompts in common.`));

  const all = (names) => [...new Set(runs.flatMap(names))];
  const ks = all((run) => run.evaluations.flatMap((e) => e.passes.map((p) => p.k))).sort((a, b) => a - b);
  const tasks = all((run) => run.evaluations.flatMap((e) => Object.keys(e.tasks))).sort();
  const metrics = all((run) => Object.keys(run.curves.values)).sort();
  any_metric(parent, runs, [...(runs.some((run) => run.evaluations.some((e) => e.reward)) ? [REWARD] : []), ...ks.map((k) => `pass@${k}`), ...tasks.map((t) => `pass@1 of ${t}`), ...metrics], "pass@1");

  append(parent, make("h3", null, "Keys that differ"));
  const known = runs.filter((run) => Object.keys(run.config).length);
  const text = (run, k) => (k in run.config ? JSON.stringify(run.config[k]) : "-");
  const keys = all((run) => Object.keys(run.config)).sort().map((k) => [k, ...known.map((run) => text(run, k))]);
  const differ = keys.filter(([, ...values]) => new Set(values).size > 1);
  append(parent, differ.length ? table("Keys that differ", ["key", ...known.map((run) => run.name)], differ) : placeholder("No recorded key differs."));
}

// Histograms of right rollouts per prompt, and charts of distinct and unsampled answers.

function prompts(parent, run) {
  const made = [];
  for (const [kind, word] of [["evaluation", "Held-out prompts"], ["step", "Training prompts"]])
    if (run.spread[kind]) made.push(spread(run.spread[kind], word, kind));
  if (!made.length) append(parent, placeholder("No rollouts are recorded. A run records them in run.dir/rollouts from its first evaluation on."));
  append(parent, make("div", { class: "charts" }, made, unsampled(run)));
}

function spread(s, word, kind) {
  const names = s.numbers.map((number) => (kind === "step" ? `step ${number}` : when(number)));
  const total = s.counts.map((row) => row.reduce((a, b) => a + b, 0));
  const values = names.flatMap((name, i) => s.bins.map((bin, b) => ({ bin, when: name, share: s.counts[i][b] / total[i], count: s.counts[i][b] })));
  return chart(`${word} by right rollouts`, kind === "step" ? "All groups of the step." : "", {
    data: { values },
    mark: { type: "bar", tooltip: true },
    encoding: {
      x: { field: "bin", type: "ordinal", sort: s.bins, title: s.of ? `right of ${s.of}` : "right rollouts of a prompt", axis: { labelAngle: s.bins.length > 9 ? -45 : 0, labelOverlap: false } },
      xOffset: { field: "when", sort: names },
      y: { field: "share", type: "quantitative", title: "share of prompts", axis: { format: ".0%", tickCount: 5 } },
      color: { field: "when", type: "nominal", title: null, sort: names, scale: { domain: names, range: [colour("grey"), colour("blue")] }, legend: { symbolType: "square" } },
      tooltip: [{ field: "when" }, { field: "bin", title: "right" }, { field: "count", title: "prompts" }, { field: "share", format: ".1%" }],
    },
  });
}

function unsampled(run) {
  const c = run.curves, get = (name) => c.values["theory_" + name] || [];
  const series = (label, name, low, high) => ({ name: label, x: c.step, y: get(name), low: low && get(low), high: high && get(high) });
  const prefix = "hold_out/unsampled_mass_";
  const held = Object.keys(c.values).map((k) => k.match(/^theory_hold_out\/unsampled_mass_(\d+)$/)).filter(Boolean).map((m) => Number(m[1])).sort((a, b) => a - b);
  if (!get("good_turing/distinct").length)
    return lines("Distinct answers", "Different final answers per group, averaged over groups.", [{ name: "distinct", x: run.by_task.step, y: run.by_task.distinct }], { y: "answers" });
  return [
    lines("Distinct answers", "Different final answers per group, and answers that occurred once, averaged over groups.",
      [series("distinct", "good_turing/distinct"), series("occurred once", "good_turing/singletons")], { y: "answers" }),
    lines("Unsampled mass of answers", "Probability of answers that no rollout gave (Good-Turing estimate). Band: 95% interval of a single group; its ends are averaged over groups.",
      [series("all", "good_turing/unseen_mass", "good_turing/low", "good_turing/high"), series("right answers", "good_turing/unseen_right")], { y: "probability", format: ".1~%" }),
    lines("New answers of held-out rollouts", "Share of held-out rollouts with an answer that the other rollouts lack. Bands: 95% intervals for these prompts.",
      [...new Set([held[0], last_of(held)])].filter(Boolean).map((h) => series(`${h} held out`, prefix + h, `${prefix}${h}_low`, `${prefix}${h}_high`)), { y: "share", format: ".1~%" }),
  ];
}
