"use strict";
// How many rollouts of each prompt are right, at both ends of a run, and what was not sampled.

function prompts(parent, run) {
  const made = [];
  for (const [kind, word] of [["evaluation", "Held-out prompts"], ["step", "Training prompts"]])
    if (run.spread[kind]) made.push(spread(run.spread[kind], word, kind));
  if (!made.length) append(parent, said("No rollouts are recorded: a run records them in run.dir/rollouts from its first evaluation on."));
  append(parent, make("div", { class: "charts" }, made, unsampled(run)));
}

const moment = (kind, number) => (kind === "step" ? `step ${number}` : `after ${number} step${number === 1 ? "" : "s"}`);

function spread(s, word, kind) {
  const names = s.numbers.map((number) => moment(kind, number));
  const total = s.counts.map((row) => row.reduce((a, b) => a + b, 0));
  const values = names.flatMap((name, i) => s.bins.map((bin, b) => ({ bin, when: name, share: s.counts[i][b] / total[i], count: s.counts[i][b] })));
  return chart(`${word}: how many have how many right`, kind === "step" ? "All groups that closed in the step." : "", {
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
    return lines("Distinct answers", "Different final answers of a group: means over groups.", [{ name: "distinct", x: run.by_task.step, y: run.by_task.distinct }], { y: "answers" });
  return [
    lines("Distinct answers", "Different final answers of a group, and those that came once: means over groups.",
      [series("distinct", "good_turing/distinct"), series("came once", "good_turing/singletons")], { y: "answers" }),
    lines("Unsampled mass of answers", "Probability of answers that no sibling gave: Good-Turing's estimate. Band: the 95% interval of a single group, its ends averaged over groups.",
      [series("all", "good_turing/unseen_mass", "good_turing/low", "good_turing/high"), series("right answers", "good_turing/unseen_right")], { y: "probability", format: ".1~%" }),
    lines("New answers of held-out siblings", "Share of held-out siblings with an answer that the others lack. Bands: 95% intervals, given the prompts.",
      [...new Set([held[0], last_of(held)])].filter(Boolean).map((h) => series(`${h} held out`, prefix + h, `${prefix}${h}_low`, `${prefix}${h}_high`)), { y: "share", format: ".1~%" }),
  ];
}
