"use strict";
// Histograms of right rollouts per prompt, and charts of distinct and unsampled answers.

function prompts(parent, run) {
  const made = [];
  for (const [kind, word] of [["evaluation", "Held-out prompts"], ["step", "Training prompts"]])
    if (run.spread[kind]) made.push(spread(run.spread[kind], word, kind));
  if (!made.length) append(parent, said("No rollouts are recorded. A run records them in run.dir/rollouts from its first evaluation on."));
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
