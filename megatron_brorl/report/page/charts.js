"use strict";
// Charts by Vega-Lite, in the page's colours; a table of the same figures stands beneath each.

const drawn = new Map(); // the box of a chart -> what draws it again in other colours
const views = new Map(); // the box of a chart -> its view, which is told to end before another takes its place

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function palette() {
  return ["blue", "orange", "green", "purple", "yellow", "grey"].map(colour);
}
const DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4], [3, 5]];

function look() {
  const ink = colour("ink"), faint = colour("faint"), line = colour("line");
  return {
    background: null,
    font: "system-ui, sans-serif",
    view: { stroke: null },
    axis: {
      labelColor: faint, titleColor: faint, gridColor: line, domainColor: line, tickColor: line, labelFontSize: 12,
      titleFontSize: 12, titleFontWeight: "normal", labelOverlap: "greedy", titlePadding: 8,
    },
    axisX: { grid: false },
    legend: { labelColor: ink, titleColor: faint, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal",
      labelLimit: innerWidth < 600 ? 130 : 240, orient: "top", columns: innerWidth < 600 ? 2 : 4 },
    text: { color: ink },
  };
}

// A figure with a heading, a chart and its table. spec: a function, for colours change; figures: [head, rows].
function chart(title, note, spec, figures, height) {
  const box = make("div", { class: "plot", role: "img", "aria-label": title + ". The table below has its figures." });
  const details = make("details", { class: "figures" }, make("summary", null, "As a table"));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1)
      details.append(table(...figures().concat([{ label: title }])));
  });
  drawn.set(box, () => draw(box, spec(), height || 220));
  return make("figure", { class: "chart" },
    make("figcaption", null, make("h3", null, title), note ? make("p", null, note) : null), box, details);
}

function draw(box, spec, height) {
  const whole = {
    $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container", height,
    autosize: { type: "fit-x", contains: "padding" }, config: look(), ...spec,
  };
  if (views.has(box)) views.get(box).finalize();
  // An interpreter instead of code made of text, which the page's policy forbids.
  return vegaEmbed(box, whole, { actions: false, ast: true, renderer: "canvas", tooltip: { theme: "custom" } })
    .then((result) => {
      views.set(box, result);
      const canvas = box.querySelector("canvas");
      if (canvas) canvas.setAttribute("aria-hidden", "true"); // the box has the name
    })
    .catch((error) => { box.replaceChildren(said("This chart cannot be drawn: " + error.message)); throw error; });
}

// Charts are drawn when they come near the screen: a phone need not draw thirty of them at once.
const near = new IntersectionObserver((entries) => {
  for (const entry of entries)
    if (entry.isIntersecting && drawn.has(entry.target)) {
      near.unobserve(entry.target);
      drawn.get(entry.target)();
    }
}, { rootMargin: "600px" });

function drawNear(parent) {
  for (const box of parent.querySelectorAll(".plot")) near.observe(box);
}

function forget(parent) {
  for (const box of parent.querySelectorAll(".plot")) {
    near.unobserve(box);
    drawn.delete(box);
    if (views.has(box)) views.get(box).finalize();
    views.delete(box);
  }
}

function drawAgain() {
  for (const box of views.keys()) drawn.get(box)();
}

// The mean of the values around each; null where there are none.
function smooth(values, half) {
  return values.map((_, i) => {
    const known = values.slice(Math.max(0, i - half), i + half + 1).filter((v) => v !== null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  });
}
const window_of = (n) => (n < 8 ? 0 : Math.max(1, Math.round(n / 20)));

// Lines over x. series: [{name, x, y, low, high}], low and high where there is an interval; options: y, x (titles),
// format, log, smooth, zero, points.
function lines(title, note, series, options) {
  const o = { x: "training step", format: ".3~g", ...options };
  const shown = series.filter((s) => s.y.some((v) => v !== null && v !== undefined && (!o.log || v > 0)));
  if (!shown.length) return null;
  const names = shown.map((s) => s.name);
  const half = o.smooth ? window_of(Math.max(...shown.map((s) => s.y.length))) : 0;
  const rows = [];
  for (const s of shown) {
    const mean = half ? smooth(s.y, half) : s.y;
    s.y.forEach((y, i) => rows.push({
      name: s.name, x: s.x[i], y: o.log && !(y > 0) ? null : y, mean: o.log && !(mean[i] > 0) ? null : mean[i],
      low: s.low ? s.low[i] : null, high: s.high ? s.high[i] : null,
    }));
  }
  const few = shown.every((s) => s.y.length <= 40);
  const text = [note, half ? `Bold: mean of ${2 * half + 1} points around; faint: each point.` : ""].filter(Boolean).join(" ");
  const spec = () => line_spec(rows, names, half, few || o.points, o);
  const head = [o.x, ...names.flatMap((n, i) => (shown[i].low ? [n, "95% interval"] : [n]))];
  const figures = () => {
    const xs = [...new Set(shown.flatMap((s) => s.x))].sort((a, b) => a - b);
    const places = shown.map((s) => new Map(s.x.map((x, i) => [x, i])));
    return [head, xs.map((x) => [short(x), ...shown.flatMap((s, k) => {
      const i = places[k].get(x);
      const y = i === undefined ? null : s.y[i];
      if (!s.low) return [short(y)];
      const known = y !== null && s.low[i] !== null && s.low[i] !== undefined;
      return [short(y), known ? `${short(s.low[i])} to ${short(s.high[i])}` : "-"];
    })])];
  };
  return chart(title, text, spec, figures, o.height);
}

function line_spec(rows, names, half, marked, o) {
  const x = { field: "x", type: "quantitative", title: o.x, axis: { tickMinStep: o.whole === false ? undefined : 1, format: "~s" },
    scale: { nice: false, padding: 6 } };
  const scale = o.log ? { type: "log", nice: true } : { zero: false, nice: true };
  const y = (field) => ({ field, type: "quantitative", title: o.y, scale, axis: { format: o.log ? ".0e" : o.format, tickCount: 5 } });
  const one = names.length === 1;
  const stroke = { field: "name", type: "nominal", title: null, scale: { domain: names, range: palette() },
    legend: one ? null : { symbolType: "stroke", symbolStrokeWidth: 2.5, symbolSize: 250, symbolOpacity: 1 } };
  const dash = { field: "name", type: "nominal", title: null, legend: stroke.legend, scale: { domain: names, range: DASHES } };
  const tooltip = [{ field: "name", title: "figure" }, { field: "x", title: o.x, format: "~f" }, { field: "y", title: o.y, format: o.format }];
  const layer = [];
  if (rows.some((r) => r.low !== null && r.low !== undefined)) {
    tooltip.push({ field: "low", title: "95% interval from", format: o.format }, { field: "high", title: "to", format: o.format });
    layer.push({ mark: { type: "area", opacity: 0.18 }, encoding: { x, y: y("low"), y2: { field: "high" }, color: stroke } });
  }
  if (half) layer.push({ mark: { type: "line", strokeWidth: 1, opacity: 0.4 }, encoding: { x, y: y("y"), color: stroke } });
  layer.push({ mark: { type: "line", strokeWidth: 2.2 }, encoding: { x, y: y("mean"), color: stroke, strokeDash: dash } });
  layer.push({
    params: [{ name: "hover", select: { type: "point", nearest: true, on: "pointerover", clear: "pointerout" } }],
    transform: [{ filter: "isValid(datum.y)" }],
    mark: { type: "point", filled: true, size: 45 },
    encoding: { x, y: y("y"), color: stroke, tooltip,
      opacity: { condition: { param: "hover", empty: false, value: 1 }, value: marked ? (half ? 0.4 : 1) : 0 } },
  });
  return { data: { values: rows }, layer };
}

// About so many round numbers from one to another.
function ticks(from, to, count) {
  const rough = Math.max(1, (to - from) / count), size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * size).find((s) => s >= rough);
  const found = [];
  for (let x = Math.ceil(from / step) * step; x <= to; x += step) found.push(x);
  return found;
}

// Bars on one another. rows: [{step, x, x2, name, y}], from x to x2 on the axis; names from below.
function stacked(title, note, rows, names, options) {
  const order = new Map(names.map((n, i) => [n, i]));
  const values = rows.map((r) => ({ ...r, order: order.get(r.name) }));
  const spec = () => ({
    data: { values },
    mark: { type: "bar", tooltip: true },
    encoding: {
      x: { field: "x", type: "quantitative", title: options.x || "training step", bin: { binned: true, step: options.step || 1 },
        axis: { format: "~s", values: ticks(values[0].x, values[values.length - 1].x2, 8), grid: false } },
      x2: { field: "x2" },
      y: { field: "y", type: "quantitative", title: options.y, stack: true, axis: { tickCount: 5, format: "~s" } },
      color: { field: "name", type: "nominal", title: null, scale: { domain: names, range: palette() }, legend: { symbolType: "square" } },
      order: { field: "order" },
      tooltip: [{ field: "name", title: "phase" }, { field: "step", title: "training step" }, { field: "y", title: options.y, format: ".3~g" }],
    },
  });
  const figures = () => {
    const xs = [...new Set(rows.map((r) => r.step))];
    const found = new Map(rows.map((r) => [r.step + "/" + r.name, r.y]));
    return [["training step", ...names], xs.map((x) => [short(x), ...names.map((n) => short(found.get(x + "/" + n)))])];
  };
  return chart(title, note, spec, figures);
}

// Cells of one colour each. cells: [{x, y, v, ...}], x and y names in order.
function cells(title, note, values, xs, ys, options, figures) {
  const spec = () => ({
    data: { values },
    mark: { type: "rect", tooltip: true },
    encoding: {
      x: { field: "x", type: "ordinal", sort: xs, title: options.x, scale: { paddingInner: 0 }, axis: { labels: options.labels !== false, ticks: false, labelAngle: 0,
          values: xs.filter((_, i) => i % Math.ceil(xs.length / 10) === 0) } },
      y: { field: "y", type: "ordinal", sort: ys, title: options.y, scale: { paddingInner: 0 }, axis: { ticks: false, labelOverlap: "greedy" } },
      color: { field: "v", type: "quantitative", title: options.v, scale: { domain: options.domain, range: ["cold", "mid", "hot"].map(colour) },
        legend: { format: ".0%", gradientLength: 160, direction: "horizontal", titleOrient: "left", columns: 1 } },
      tooltip: options.tooltip,
    },
  });
  return chart(title, note, spec, figures, options.height);
}
