"use strict";
// The page as a whole: its parts in order, light and dark, and what is new of a run that goes on.

let content = JSON.parse(document.getElementById("content").textContent);
const state = { kind: "", number: 0, prompt: "", group: null, search: "", filter: "all", colours: "log_prob", figure: "reward", compared: "" };
const POLL_MS = 3000;

// id, heading, what draws it, and what of the content it depends on.
const SINGLE = [
  ["verdict", "Verdict", verdict, (run) => [run.verdict, run.evaluations, run.change, run.missing, run.memory_mib]],
  ["curves", "Curves", curves, (run) => [run.curves, run.evaluations, run.by_task]],
  ["spent", "Checkpoints", spent, (run) => [run.checkpoints, run.generation]],
  ["prompts", "Prompts", prompts, (run) => [run.spread, run.heat, run.curves, run.missing]],
  ["rollouts", "Rollouts", rollouts, () => content.rollouts],
  ["configuration", "Configuration", configuration, (run) => [run.config, run.starts, run.missing]],
];
const SEVERAL = [
  ["comparison", "Comparison", comparison, () => content.runs],
  ["spent", "Checkpoints", several_spent, () => [content.time_to, content.runs.map((run) => [run.checkpoints, run.generation])]],
];
const before = new Map(); // id of a part -> what it was drawn from

// Whether somebody types or reads there: what is new can wait until that is over.
function busy(part) {
  return part.contains(document.activeElement) || (part.id === "rollouts" && part.matches(":hover"));
}

function drawParts() {
  const several = content.runs.length > 1, main = document.getElementById("main");
  for (const [id, heading, draws, depends] of several ? SEVERAL : SINGLE) {
    const own = several ? content : content.runs[0];
    const now = JSON.stringify(depends(own));
    let part = document.getElementById(id);
    if (before.get(id) === now || (part && busy(part))) continue;
    before.set(id, now);
    if (!part) {
      part = make("section", { id, "aria-labelledby": id + "-heading" });
      main.append(part);
      document.getElementById("contents").append(make("a", { href: "#" + id }, heading));
    }
    part.style.minHeight = part.offsetHeight + "px"; // what is below stays in its place meanwhile
    forget(part);
    part.replaceChildren(make("h2", { id: id + "-heading" }, heading));
    draws(part, own);
    drawNear(part);
    setTimeout(() => { part.style.minHeight = ""; }, 1500);
  }
  document.getElementById("about").textContent = `Made ${content.made} by megatron-brorl ${content.version}. Nothing is fetched from anywhere.`;
}

// Light and dark: what the reader chose, else what the system says.
function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function label() {
  document.getElementById("theme").textContent = dark() ? "Light" : "Dark";
}

function themed(name) {
  document.documentElement.dataset.theme = name;
  label();
  drawAgain();
}

document.getElementById("theme").addEventListener("click", () => themed(dark() ? "light" : "dark"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { label(); drawAgain(); });
if (["#dark", "#light"].includes(location.hash)) themed(location.hash.slice(1));
label();
drawParts();

// A run that goes on: ask where the page came from.
let tag = "", lost = 0;
function poll() {
  const live = document.getElementById("live");
  fetch("content", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" }).then(async (answer) => {
    lost = 0;
    if (answer.status === 200) {
      tag = answer.headers.get("ETag") || "";
      content = await answer.json();
      drawParts();
    } else if (answer.status !== 304) throw new Error((await answer.text()).trim());
    live.textContent = `Following the run; figures of ${content.made}.`;
  }).catch((error) => {
    lost += 1;
    live.textContent = `Not updated since ${content.made}: ${error.message}.`;
  }).finally(() => setTimeout(poll, POLL_MS * Math.min(1 + lost, 10)));
}
if (content.live) poll();
