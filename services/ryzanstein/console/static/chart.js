// Charts of lines over time, as SVG of our own.

import { make, svg } from "./dom.js";

const WIDTH = 640;
const HEIGHT = 170;
const LEFT = 46;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 24;

/**
 * @typedef {[number, number | null]} Dot A time and a value; null: nobody told one, and the line has a gap.
 * @typedef {{name: string, colour: number, dots: Dot[], steps?: boolean}} Line
 * @typedef {{from: number, to: number, label: string}} Band A time in which something happened.
 * @typedef {{title: string, unit: string, from: number, to: number, lines: Line[], ticks: [number, string][], bands?: Band[], most?: number, said?: string}} Chart
 */

/** @param {number} value */
export function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)}k`;
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : String(Number(value.toPrecision(2)));
}

/** Returns the smallest of 1, 2, 5, 10, 20, ... that is not below a value. @param {number} value */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * (/** @type {number} */ ([1, 2, 5, 10].find((step) => step * unit >= value * 0.9999)));
}

/** Returns a figure with a chart, its legend, and what it says for those who do not see it. @param {Chart} chart */
export function figure(chart) {
  const values = chart.lines.flatMap((line) => line.dots.map(([, value]) => value ?? 0));
  const most = chart.most ?? roundUp(values.reduce((one, other) => Math.max(one, other), 0));
  const x = (/** @type {number} */ at) => LEFT + ((at - chart.from) / (chart.to - chart.from || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (/** @type {number} */ value) => HEIGHT - BOTTOM - (Math.min(value, most) / most) * (HEIGHT - TOP - BOTTOM);
  const drawn = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.said ?? spoken(chart) });
  for (const value of [0, most / 2, most]) {
    drawn.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    drawn.append(svg("text", { class: "tick end", x: LEFT - 6, y: y(value) + 4 }, short(value)));
  }
  for (const band of chart.bands ?? []) drawn.append(...shaded(band, x));
  chart.ticks.forEach(([at, text], number) => {
    const place = number === chart.ticks.length - 1 ? "end" : number ? "middle" : "start";
    drawn.append(svg("text", { class: `tick ${place}`, x: x(at), y: HEIGHT - 6 }, text));
  });
  for (const line of chart.lines) drawn.append(svg("path", { class: `line c${line.colour % 8}`, d: path(line, x, y) }));
  const heads = chart.lines.map((line) => {
    const last = line.dots.at(-1)?.[1];
    const now = last === null || last === undefined || line.steps ? "" : ` ${short(last)}`;
    return make("li", {}, swatch(line.colour), `${line.name}${now}`);
  });
  const caption = make("figcaption", {}, make("strong", { textContent: chart.title }), ` ${chart.unit}`);
  return make("figure", { className: "chart" }, caption, drawn, make("ul", { className: "legend" }, ...heads));
}

/** Returns a piece of a line as it is drawn: lines differ by more than colour. @param {number} colour */
function swatch(colour) {
  const drawn = svg("svg", { class: "swatch", viewBox: "0 0 28 8", "aria-hidden": "true" });
  drawn.append(svg("path", { class: `line c${colour % 8}`, d: "M0 4H28" }));
  return drawn;
}

/**
 * @param {Band} band
 * @param {(at: number) => number} x
 */
function shaded(band, x) {
  const from = x(band.from);
  const wide = Math.max(2, x(band.to) - from);
  const after = from + wide / 2 > WIDTH - 120;
  return [
    svg("rect", { class: "band", x: from, y: TOP, width: wide, height: HEIGHT - TOP - BOTTOM }),
    svg("text", { class: `tick ${after ? "end" : "start"}`, x: after ? from - 4 : from + wide + 4, y: TOP + 10 }, band.label),
  ];
}

/**
 * @param {Line} line
 * @param {(at: number) => number} x
 * @param {(value: number) => number} y
 */
function path(line, x, y) {
  let drawn = "";
  /** @type {number | null} */
  let before = null;
  for (const [at, value] of line.dots) {
    if (value === null) before = null;
    else {
      const place = `${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      if (before === null) drawn += `M${place}h0.1`; // a dot that stands alone is seen too
      else drawn += line.steps ? `H${x(at).toFixed(1)}V${y(value).toFixed(1)}` : `L${place}`;
      before = value;
    }
  }
  return drawn;
}

/** @param {Chart} chart */
function spoken(chart) {
  const lines = chart.lines.map(({ name, dots }) => {
    const told = /** @type {number[]} */ (dots.map(([, value]) => value).filter((value) => value !== null));
    return told.length ? `${name}: now ${short(told[told.length - 1])}, most ${short(Math.max(...told))}` : `${name}: not told`;
  });
  return `${chart.title}, ${chart.unit}. ${lines.join("; ")}`;
}
