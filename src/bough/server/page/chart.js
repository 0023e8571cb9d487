// A small line chart over time.

import { svg } from "./tree.js";

const MARGIN = { left: 26, right: 8, top: 8, bottom: 16 };
const MAX_POINTS = 160;

/** Returns a round number at or above `value`. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * unit).find((step) => step >= value * 0.999);
}

/** Averages neighbouring points down to at most MAX_POINTS. */
function thin(points) {
  const group = Math.ceil(points.length / MAX_POINTS);
  if (group <= 1) return points;
  const means = [];
  for (let start = 0; start < points.length; start += group) {
    const slice = points.slice(start, start + group);
    means.push([slice.at(-1)[0], slice.reduce((sum, point) => sum + point[1], 0) / slice.length]);
  }
  return means;
}

function seconds(value) {
  return value >= 120 ? `${Math.round(value / 60)} min` : `${value >= 10 ? Math.round(value) : value.toFixed(1)} s`;
}

/** Renders `series` ([{className, points: [[seconds, value], ...]}]) into `host`. */
export function renderChart(host, series, { label, format }) {
  const width = Math.max(100, host.clientWidth);
  const height = Math.max(60, host.clientHeight);
  const lines = series.map((line) => ({ ...line, points: thin(line.points) })).filter((line) => line.points.length);
  const all = lines.flatMap((line) => line.points);
  const end = Math.max(0.5, ...all.map((point) => point[0]));
  const top = ceiling(Math.max(0, ...all.map((point) => point[1])));
  const x = (time) => MARGIN.left + (time / end) * (width - MARGIN.left - MARGIN.right);
  const y = (value) => height - MARGIN.bottom - (value / top) * (height - MARGIN.top - MARGIN.bottom);
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const value of [0, top / 2, top]) {
    picture.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }));
    if (value !== top / 2) picture.append(svg("text", { class: "tick", x: MARGIN.left - 6, y: y(value) + 3.5, "text-anchor": "end" }, format(value)));
  }
  picture.append(svg("text", { class: "tick", x: width - MARGIN.right, y: height - 3, "text-anchor": "end" }, all.length ? seconds(end) : ""));
  for (const { className, points } of lines) {
    const line = points.map(([time, value], index) => `${index ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const area = `${line}L${x(points.at(-1)[0]).toFixed(1)} ${y(0)}L${x(points[0][0]).toFixed(1)} ${y(0)}Z`;
    picture.append(svg("path", { class: `area ${className}`, d: area }), svg("path", { class: `line ${className}`, d: line }));
    picture.append(svg("circle", { class: `end ${className}`, cx: x(points.at(-1)[0]), cy: y(points.at(-1)[1]), r: 2.5 }));
  }
  host.replaceChildren(picture);
}
