"use strict";
// How prompts move: right of N, step by step and prompt by prompt, and what the siblings left unsampled.

function prompts(parent, run) {
  const made = [];
  for (const [kind, word] of [["evaluation", "Held-out prompts"], ["step", "Training prompts"]]) {
    const s = run.spread[kind];
    if (s) made.push(...spread(s, word, kind));
  }
  if (!made.length) append(parent, [said(run.missing.rollouts)]);
  for (const [kind, word] of [["evaluation", "Held-out prompts"], ["step", "Training prompts that came again"]])
    if (run.heat[kind]) made.push(heat(run.heat[kind], word, kind));
  append(parent, [make("div", { class: "charts" }, made, unsampled(run))]);
  if (run.missing.theory) append(parent, [said(run.missing.theory)]);
}

function spread(s, word, kind) {
  const right = s.of ? `right of ${s.of}` : "right rollouts of a prompt";
  const total = s.counts.map((row) => row.reduce((a, b) => a + b, 0));
  const last = s.numbers.length - 1;
  const when = (i) => moment(kind, s.numbers[i]);
  const title = `${word}: how many have how many right`;
  // Both ends of the run; the heat map has what is between.
  const ends = last ? [0, last] : [0];
  const values = ends.flatMap((i) => s.bins.map((bin, b) => ({ bin, when: when(i), share: s.counts[i][b] / total[i], count: s.counts[i][b] })));
  const names = ends.map(when);
  const spec = () => ({
    data: { values },
    mark: { type: "bar", tooltip: true },
    encoding: {
      x: { field: "bin", type: "ordinal", sort: s.bins, title: right, axis: { labelAngle: s.bins.length > 9 ? -45 : 0, labelOverlap: false } },
      xOffset: { field: "when", sort: names },
      y: { field: "share", type: "quantitative", title: "share of prompts", axis: { format: ".0%", tickCount: 5 } },
      color: { field: "when", type: "nominal", title: null, sort: names, scale: { domain: names, range: [colour("grey"), colour("blue")] }, legend: { symbolType: "square" } },
      tooltip: [{ field: "when" }, { field: "bin", title: "right" }, { field: "count", title: "prompts" }, { field: "share", format: ".1%" }],
    },
  });
  const figures = () => [["right", ...s.numbers.map((_, i) => when(i))], s.bins.map((bin, b) => [bin, ...s.counts.map((row) => String(row[b]))])];
  const made = [chart(title, kind === "step" ? "Of all groups that closed in the step." : "", spec, figures)];
  if (last) {
    const grid = s.counts.flatMap((row, i) => row.map((count, b) => ({ x: s.numbers[i], y: s.bins[b], v: count / total[i], count })));
    made.push(cells(`${word}: movement`, "Each column is one moment; the further from the background, the more prompts.", grid, s.numbers, [...s.bins].reverse(),
      { x: "training step", y: right, v: "share of prompts", tooltip: [{ field: "x", title: "steps" }, { field: "y", title: "right" }, { field: "count", title: "prompts" }, { field: "v", title: "share", format: ".1%" }] }, figures));
  }
  return made;
}

// A step by its number in metrics.jsonl, an evaluation by the steps done before it.
function moment(kind, number) {
  return kind === "step" ? `step ${number}` : `after ${number} step${number === 1 ? "" : "s"}`;
}

function heat(h, word, kind) {
  const steps = [...h.numbers].reverse();
  const values = h.prompts.flatMap((p, i) => h.numbers.map((n, k) => ({ x: p, y: n, v: h.shares[i][k], task: h.tasks[i] })).filter((c) => c.v !== null));
  const note = `Each column is one of ${h.prompts.length} prompts, in order of its share at first, and then at last.` +
    (h.left_out ? ` ${h.left_out} more prompts are left out.` : "");
  const figures = () => [["prompt", ...h.numbers.map((n) => moment(kind, n))], h.prompts.map((p, i) => [p, ...h.shares[i].map(percent)])];
  const made = cells(`${word}: share right, prompt by prompt`, note, values, h.prompts, steps,
    { x: "prompts", y: "training step", v: "right", labels: false, domain: [0, 1], height: Math.min(320, Math.max(120, 26 * steps.length)),
      tooltip: [{ field: "x", title: "prompt" }, { field: "task" }, { field: "y", title: "steps" }, { field: "v", title: "right", format: ".1%" }] }, figures);
  made.classList.add("wide");
  return made;
}

function unsampled(run) {
  const c = run.curves, get = (name) => c.values["theory_good_turing/" + name];
  const series = (name, label, low, high) => ({ name: label, x: c.step, y: get(name) || [], low: low && (get(low) || c.step.map(() => null)), high: high && (get(high) || c.step.map(() => null)) });
  const held = Object.keys(c.values).filter((k) => /^theory_hold_out\/unsampled_mass_\d+$/.test(k)).map((k) => Number(k.split("_").pop())).sort((a, b) => a - b);
  const end = (h, which) => c.values[`theory_hold_out/unsampled_mass_${h}_${which}`] || c.step.map(() => null);
  if (!get("distinct") && run.by_task.step.length)
    return [lines("Distinct answers", "Different final answers of a group: means over groups.", [{ name: "distinct", x: run.by_task.step, y: run.by_task.distinct }], { y: "answers" })];
  return [
    lines("Distinct answers", "Different final answers of a group, and those that came once: means over groups.", [series("distinct", "distinct"), series("singletons", "came once")], { y: "answers" }),
    lines("Unsampled mass of answers", "Probability of answers that no sibling gave: Good-Turing's estimate. Band: the 95% interval of a single group, its ends averaged over groups.",
      [series("unseen_mass", "all", "low", "high"), series("unseen_right", "right answers")], { y: "probability", format: ".1~%" }),
    held.length ? lines("What held-out siblings add", "Share of held-out siblings with an answer that the others lack. Bands: 95% intervals, given the prompts.",
      [...new Set([held[0], held[held.length - 1]])].map((h) => ({ name: `${h} held out`, x: c.step, y: c.values[`theory_hold_out/unsampled_mass_${h}`], low: end(h, "low"), high: end(h, "high") })), { y: "share", format: ".1~%" }) : null,
  ];
}
