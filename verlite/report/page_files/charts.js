// Charts as SVG. A series is {name, color, points: [[x, y], ...]} with y a number.

const COLORS = ["#4269d0", "#e8850c", "#2e9e5b", "#d1495b", "#9a5fd0", "#0f9bb3", "#b8860b", "#8a6d5b"];
const MAX_POINTS = 300;

function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "rect", "g", "circle"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function format(value) {
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
}

const tip = {
  show(event, text) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = false;
    const left = Math.min(event.clientX + 14, window.innerWidth - box.offsetWidth - 6);
    const above = event.clientY + 16 + box.offsetHeight > window.innerHeight;
    box.style.left = `${Math.max(4, left)}px`;
    box.style.top = `${above ? event.clientY - box.offsetHeight - 10 : event.clientY + 16}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
};

const PICKS = { mean: (values) => values.reduce((a, b) => a + b, 0) / values.length, low: (values) => Math.min(...values), high: (values) => Math.max(...values) };

// Points with at most MAX_POINTS x values: each is the mean of its neighbors, or the least or largest.
function thinned(points, pick = "mean") {
  if (points.length <= MAX_POINTS) return [...points];
  const size = Math.ceil(points.length / MAX_POINTS);
  const result = [];
  for (let start = 0; start < points.length; start += size) {
    const part = points.slice(start, start + size);
    result.push([part[Math.floor(part.length / 2)][0], PICKS[pick](part.map((point) => point[1]))]);
  }
  return result;
}

// Exponential moving average that is not pulled to the first value.
function smoothed(points, weight) {
  if (!weight) return points;
  let sum = 0, total = 0;
  return points.map(([x, y]) => {
    sum = weight * sum + (1 - weight) * y;
    total = weight * total + (1 - weight);
    return [x, sum / total];
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const result = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) result.push(i * step);
  return result;
}

function limits(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === 0 && high === 0) return [0, 1];  // most metrics are never negative
  if (low === high) { const pad = Math.abs(low) / 10 || 0.5; return [low - pad, high + pad]; }
  return [low, high];
}

const WIDTH = 420, HEIGHT = 190, LEFT = 52, RIGHT = 10, TOP = 20, BOTTOM = 22;
const UNITS = [
  [/^timing_s\/|time_per_step/, "s"], [/gb\b|_gb/, "GB"], [/throughput/, "tokens/s"],
  [/clip_ratio|clipfrac|zero_variance|fraction/, "share"], [/length/, "tokens"],
  [/entropy|kl\b|kl_loss|log_prob_gap/, "nats"], [/^val-core|score|reward/, "score"],
];

// The unit of a metric, or "".
function unit(key) { return UNITS.find(([words]) => words.test(key.toLowerCase()))?.[1] ?? ""; }

// A name that is broken only behind a / or _ .
function breakable(name) { return name.split(/(?<=[/_])/).flatMap((part) => [element("wbr"), part]).slice(1); }

function frame(xRange, yRange, unit) {
  const [x0, x1] = xRange[0] === xRange[1] ? [xRange[0] - 0.5, xRange[1] + 0.5] : xRange;
  const [y0, y1] = yRange;
  const x = (value) => LEFT + ((value - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  for (const value of ticks(y0, y1, 5)) {
    svg.append(
      element("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      element("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(+value.toPrecision(6))),
    );
  }
  svg.append(
    element("text", { x: LEFT - 6, y: 9, "text-anchor": "end", class: "unit" }, unit),
    element("text", { x: WIDTH - RIGHT, y: HEIGHT - 6, "text-anchor": "end", class: "unit" }, "step"),
  );
  for (const value of ticks(x0, x1, 5).filter((value) => Number.isInteger(value) && x(value) < WIDTH - RIGHT - 40)) {
    svg.append(element("text", { x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, format(value)));
  }
  return { svg, x, y, step: (px) => x0 + ((px - LEFT) / (WIDTH - LEFT - RIGHT)) * (x1 - x0) };
}

// Call `text(step)` where the pointer is and mark that step. It returns [step, lines] or null.
function follow({ svg, x, step }, text) {
  const cursor = element("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const found = text(step(((event.clientX - box.left) / box.width) * WIDTH));
    if (!found) return;
    cursor.setAttribute("x1", x(found[0]));
    cursor.setAttribute("x2", x(found[0]));
    cursor.setAttribute("visibility", "visible");
    tip.show(event, [`step ${found[0]}`, ...found[1]].join("\n"));
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    tip.hide();
  });
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

// One chart with a line per series. A series may have `bands` [low, high], whose areas are shaded.
// `marks` are warnings {step, name}, drawn as triangles on the axis of steps.
function lineChart(title, series, { smoothing = 0, note = "" } = {}) {
  const card = element("div", { class: "card chart", "data-metric": title });
  card.append(element("h3", note ? { title: note } : {}, ...breakable(title)));
  const lines = series.filter((one) => one.points.length);
  const all = lines.flatMap((one) => [...one.points, ...(one.bands ?? []).flat(2)]);
  const axes = frame(limits(all.map((point) => point[0])), limits(all.map((point) => point[1])), unit(title));
  const path = (points) => points.map(([px, py]) => `${axes.x(px).toFixed(1)},${axes.y(py).toFixed(1)}`).join("L");
  for (const one of lines) {
    for (const [low, high] of one.bands ?? []) {
      if (!low.length || !high.length) continue;
      const area = `M${path(thinned(low, "low"))}L${path(thinned(high, "high").reverse())}Z`;
      axes.svg.append(element("path", { class: "band", d: area, fill: one.color, opacity: 0.15 }));
    }
    const shown = thinned(one.points);
    if (smoothing) axes.svg.append(element("path", { class: "curve", d: `M${path(shown)}`, stroke: one.color, opacity: 0.25 }));
    axes.svg.append(element("path", { class: "curve", d: `M${path(thinned(smoothed(one.points, smoothing)))}`, stroke: one.color }));
    if (shown.length < 40) {
      for (const [px, py] of shown) axes.svg.append(element("circle", { cx: axes.x(px), cy: axes.y(py), r: 1.8, fill: one.color }));
    }
  }
  for (const one of lines) {
    for (const { step } of one.marks ?? []) {
      const left = axes.x(step), base = HEIGHT - BOTTOM;
      if (left < LEFT || left > WIDTH - RIGHT + 1) continue;
      axes.svg.append(element("path", { class: "mark", d: `M${left},${base - 8}L${left - 4},${base}L${left + 4},${base}Z` }));
    }
  }
  follow(axes, (x) => {
    const found = lines.map((one) => [one, nearest(one.points, x)]);
    const at = found.map(([, point]) => point[0]).sort((a, b) => Math.abs(a - x) - Math.abs(b - x))[0];
    const texts = found.filter(([, point]) => point[0] === at)
      .map(([one, point]) => `${lines.length > 1 ? one.name + "  " : ""}${format(point[1])}`);
    const marks = lines.flatMap((one) => (one.marks ?? []).filter((mark) => mark.step === at));
    return [at, [...texts, ...marks.map((mark) => `warning: ${mark.name}`)]];
  });
  card.append(axes.svg);
  return card;
}

// Stacked bars. `parts` is [{name, color, values: Map of x to height}].
function stackedChart(title, parts) {
  const card = element("div", { class: "card chart" }, element("h3", {}, title));
  const xs = [...new Set(parts.flatMap((part) => [...part.values.keys()]))].sort((a, b) => a - b);
  const size = Math.ceil(xs.length / 150);
  const bins = [];
  for (let start = 0; start < xs.length; start += size) {
    const own = xs.slice(start, start + size);
    const heights = parts.map((part) => own.reduce((sum, x) => sum + (part.values.get(x) ?? 0), 0) / own.length);
    bins.push({ x: own[0], last: own[own.length - 1], heights });
  }
  const top = Math.max(...bins.map((bin) => bin.heights.reduce((a, b) => a + b, 0)), 1e-9);
  const axes = frame([xs[0] - 0.5, xs[xs.length - 1] + 0.5], [0, top], "s");
  for (const bin of bins) {
    let base = 0;
    const left = axes.x(bin.x - 0.42), width = Math.max(1, axes.x(bin.last + 0.42) - left);
    bin.heights.forEach((height, i) => {
      if (height > 0) {
        axes.svg.append(element("rect", {
          x: left.toFixed(1), width: width.toFixed(1), fill: parts[i].color,
          y: axes.y(base + height).toFixed(1), height: (axes.y(base) - axes.y(base + height)).toFixed(2),
        }));
      }
      base += height;
    });
  }
  follow(axes, (x) => {
    const bin = bins.reduce((best, one) => (Math.abs(one.x - x) < Math.abs(best.x - x) ? one : best));
    const order = parts.map((part, i) => [part.name, bin.heights[i]]).filter(([, height]) => height > 0);
    order.sort((a, b) => b[1] - a[1]);
    return [bin.x, order.slice(0, 12).map(([name, height]) => `${format(height)} s  ${name}`)];
  });
  card.append(axes.svg, legend(parts));
  return card;
}

function legend(series) {
  return element("div", { class: "legend" }, ...series.map((one) =>
    element("span", {}, element("span", { class: "dot", style: `background:${one.color}` }), one.name)));
}
