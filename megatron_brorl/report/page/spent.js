"use strict";
// What runs had spent when they got how far.

const whole = (x) => (x === null || x === undefined ? "-" : Math.round(x).toLocaleString("en"));

function at_checkpoints(run) {
  const ks = [...new Set(run.checkpoints.flatMap((row) => row.passes.map((p) => p.k)))].sort((a, b) => a - b);
  const shown = ks.length > 1 ? [ks[0], ks[ks.length - 1]] : ks;
  const rows = run.checkpoints.map((row) => [String(row.steps), duration(row.seconds), whole(row.rollouts), whole(row.kept),
    ...shown.map((k) => interval(row.passes.find((p) => p.k === k)))]);
  return table(["steps", "time of steps", "rollouts", "trained on", ...shown.map((k) => `pass@${k}`)], rows, { label: `Checkpoints of ${run.name}` });
}

function sampling(runs) {
  const rows = runs.filter((run) => run.generation).map((run) => {
    const g = run.generation;
    return [run.name, run.n ? String(run.n) : "-", short(g.rollouts_per_s), short(g.tokens_per_s), percent(g.share_of_step), short(g.end_to_end_per_s),
      short(g.kept_per_s), short(g.rows), short(g.intensity), percent(g.prompt_hits), percent(g.prompt_shared)];
  });
  return [
    make("h3", null, "Generation alone"),
    rows.length ? table(["run", "N", "rollouts/s", "tokens/s", "share of a step", "rollouts/s, whole steps", "trained on/s, whole steps", "decoded together",
      "operations per byte", "prompt found", "at most"], rows, { label: "Generation alone" }) : said("No step has sampled anything yet."),
    rows.length ? make("p", { class: "note" }, "The first two are over the seconds of sampling, of all devices. Decoded together: rollouts on a device in one turn, and prompt found: prompt tokens that siblings had computed; both of the built-in engine. Operations per byte of weights read; attention is not in it.") : null,
  ];
}

function spent(parent, run) {
  append(parent, [run.checkpoints.length ? at_checkpoints(run) : said(run.missing.evaluation || "No evaluation yet."), sampling([run])]);
}

function several_spent(parent, content) {
  const runs = content.runs;
  runs.forEach((run) => append(parent, [make("h3", null, run.name), run.checkpoints.length ? at_checkpoints(run) : said("No evaluation yet.")]));
  const rows = content.time_to.flatMap((to, i) => (to ? [[runs[i].name, percent(to.target),
    ...to.runs.map((r) => (r ? `${duration(r.seconds)}, ${whole(r.rollouts)} rollouts` : "never"))]] : []));
  append(parent, [make("h3", null, "Time to a target")]);
  append(parent, rows.length ? [
    table(["end of", "pass@1", ...runs.map((run) => run.name)], rows, { label: "Time to a target" }),
    make("p", { class: "note" }, "When each run first held what one of them ended with, on straight lines between evaluations; time of steps alone. Noise makes a curve early as well."),
  ] : [said("No run has an evaluation yet.")]);
  append(parent, sampling(runs));
}
