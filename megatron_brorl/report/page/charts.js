"use strict";
// Charts by Vega-Lite, in the page's colours.

const drawers = new Map(); // element of a chart that is not drawn yet -> function that draws it
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const palette = () => ["blue", "orange", "green", "purple", "yellow", "grey"].map(colour);
const DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4], [3, 5]];

function look() {
  const ink = colour("ink"), faint = colour("faint"), line = colour("line");
  const titles = { titleColor: faint, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" };
  return {
    background: null, font: "system-ui, sans-serif", view: { stroke: null }, text: { color: ink }, axisX: { grid: false },
    axis: { ...titles, labelColor: faint, gridColor: line, domainColor: line, tickColor: line, labelOverlap: "greedy", titlePadding: 8 },
    legend: { ...titles, labelColor: ink, labelLimit: innerWidth < 600 ? 130 : 240, orient: "top", columns: innerWidth < 600 ? 2 : 4 },
  };
}

// Draw a chart when it comes near the screen. A phone would be slow if it drew thirty charts at once.
const near = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((e) => e.isIntersecting)) {
    near.unobserve(entry.target);
    drawers.get(entry.target)();
    drawers.delete(entry.target);
  }
}, { rootMargin: "600px" });

// Return a figure with a heading and a chart.
function chart(title, note, spec, height) {
  const box = make("div", { class: "plot", role: "img", "aria-label": title });
  const whole = {
    $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container", height: height || 220,
    autosize: { type: "fit-x", contains: "padding" }, config: look(), ...spec,
  };
  // Vega interprets its expressions (ast), because the page's policy forbids code made from text.
  drawers.set(box, () => vegaEmbed(box, whole, { actions: false, ast: true, renderer: "canvas", tooltip: { theme: "custom" } })
    .catch((error) => { box.replaceChildren(placeholder("This chart cannot be drawn: " + error.message)); throw error; }));
  near.observe(box);
  return make("figure", { class: "chart" }, make("figcaption", null, make("h3", null, title), note ? make("p", null, note) : null), box);
}

// Return the running mean, with null where all values are missing.
function smooth(values, half) {
  return values.map((_, i) => {
    const known = values.slice(Math.max(0, i - half), i + half + 1).filter((v) => v !== null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  });
}

// Draw lines. series: [{name, x, y, low, high}], low and high if there is an interval. options: y, x (axis titles),
// format, log, smooth, whole (integer ticks), points (always mark points).
function lines(title, note, series, options) {
  const o = { x: "training step", format: ".3~g", ...options };
  const shown = series.filter((s) => s.y.some((v) => v !== null && v !== undefined && (!o.log || v > 0)));
  if (!shown.length) return null;
  const most = Math.max(...shown.map((s) => s.y.length));
  const half = o.smooth && most >= 8 ? Math.max(1, Math.round(most / 20)) : 0;
  const drawable = (v) => (o.log && !(v > 0) ? null : v);
  const rows = shown.flatMap((s) => {
    const mean = half ? smooth(s.y, half) : s.y;
    return s.y.map((y, i) => ({ name: s.name, x: s.x[i], y: drawable(y), mean: drawable(mean[i]), low: s.low ? s.low[i] : null, high: s.high ? s.high[i] : null }));
  });
  const text = [note, half ? `Bold: mean of ${2 * half + 1} points. Faint: single points.` : ""].filter(Boolean).join(" ");
  return chart(title, text, line_spec(rows, shown.map((s) => s.name), half, most <= 40 || o.points, o));
}

function line_spec(rows, names, half, marked, o) {
  const x = { field: "x", type: "quantitative", title: o.x, axis: { tickMinStep: o.whole === false ? undefined : 1, format: "~s" },
    scale: { nice: false, padding: 6 } };
  const scale = o.log ? { type: "log", nice: true } : { zero: false, nice: true };
  const y = (field) => ({ field, type: "quantitative", title: o.y, scale, axis: { format: o.log ? ".0e" : o.format, tickCount: 5 } });
  const legend = names.length === 1 ? null : { symbolType: "stroke", symbolStrokeWidth: 2.5, symbolSize: 250, symbolOpacity: 1 };
  const named = (range) => ({ field: "name", type: "nominal", title: null, legend, scale: { domain: names, range } });
  const color = named(palette());
  const tooltip = [{ field: "name", title: "metric" }, { field: "x", title: o.x, format: "~f" }, { field: "y", title: o.y, format: o.format }];
  const layer = [];
  if (rows.some((r) => r.low !== null && r.low !== undefined)) {
    tooltip.push({ field: "low", title: "95% interval from", format: o.format }, { field: "high", title: "to", format: o.format });
    layer.push({ mark: { type: "area", opacity: 0.18 }, encoding: { x, y: y("low"), y2: { field: "high" }, color } });
  }
  if (half) layer.push({ mark: { type: "line", strokeWidth: 1, opacity: 0.4 }, encoding: { x, y: y("y"), color } });
  layer.push({ mark: { type: "line", strokeWidth: 2.2 }, encoding: { x, y: y("mean"), color, strokeDash: named(DASHES) } });
  layer.push({
    params: [{ name: "hover", select: { type: "point", nearest: true, on: "pointerover", clear: "pointerout" } }],
    transform: [{ filter: "isValid(datum.y)" }],
    mark: { type: "point", filled: true, size: 45 },
    encoding: { x, y: y("y"), color, tooltip,
      opacity: { condition: { param: "hover", empty: false, value: 1 }, value: marked ? (half ? 0.4 : 1) : 0 } },
  });
  return { data: { values: rows }, layer };
}

// Draw stacked areas. rows: [{x, name, y}]. names: from bottom to top.
function stacked(title, note, rows, names, ytitle) {
  const order = new Map(names.map((n, i) => [n, i]));
  return chart(title, note, {
    data: { values: rows.map((r) => ({ ...r, order: order.get(r.name) })) },
    mark: { type: "area", line: false, interpolate: "step", tooltip: true },
    encoding: {
      x: { field: "x", type: "quantitative", title: "training step", axis: { format: "~s", tickMinStep: 1 }, scale: { nice: false } },
      y: { field: "y", type: "quantitative", title: ytitle, stack: true, axis: { tickCount: 5, format: "~s" } },
      color: { field: "name", type: "nominal", title: null, scale: { domain: names, range: palette() }, legend: { symbolType: "square" } },
      order: { field: "order" },
    },
  });
}
