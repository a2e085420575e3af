"use strict";
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
