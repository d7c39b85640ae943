"use strict";
// Values under the pointer, a drag that zooms, a double click that goes back. Without it the drawings stay as they are.
const W = 640, H = 240, L = 64, R = 14, T = 10, B = 28, NS = "http://www.w3.org/2000/svg";
const make = (name, attributes, parent) => {
  const node = document.createElementNS(NS, name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  return parent ? parent.appendChild(node) : node;
};
const number = (v) => {
  for (const [size, by, word] of [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (Math.abs(v) >= size) return +(v / by).toPrecision(3) + word;
  if (v && Math.abs(v) < 1e-2) {
    const [digits, exponent] = v.toExponential(2).split("e");
    return +digits + "e" + +exponent;
  }
  return String(+v.toPrecision(4));
};
// round numbers between two, as in chart.py
const ticks = (low, high, log) => {
  const found = [];
  if (log && high > 30 * low) {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
    for (let power = first; power <= last; power += Math.ceil((last - first + 1) / 6)) found.push(10 ** power);
    return found;
  }
  const rough = (high - low) / 4;
  if (!(rough > 0)) return [low];
  const size = 10 ** Math.floor(Math.log10(rough));
  const off = (factor) => Math.abs(Math.log(size * factor / rough));
  const distance = size * [1, 2, 5, 10].reduce((best, factor) => off(factor) < off(best) ? factor : best);
  const end = Math.floor(high / distance + 1e-9);
  for (let place = Math.ceil(low / distance - 1e-9); place <= end; place++)
    found.push(+(place * distance).toPrecision(12));
  return found;
};
const nearest = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle + 1; else high = middle; }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
};
JSON.parse(document.getElementById("charts").textContent).forEach((chart, index) => {
  const figure = document.getElementById("chart-" + index), value = figure.querySelector(".value");
  const height = (v) => chart.log ? Math.log10(v) : v;
  const all = chart.lines.flatMap((line) => line.x);
  if (!all.length) return;
  const whole = all.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  let [x0, x1] = whole, svg, cursor, zoom, from = null;
  const step = (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * W;
    return x0 + Math.min(1, Math.max(0, (x - L) / (W - L - R))) * (x1 - x0);
  };
  const draw = () => {
    let y0 = Infinity, y1 = -Infinity;
    const shown = chart.lines.map((line) => {
      const kept = [];
      line.x.forEach((x, i) => {
        // a point on either side, so that lines reach the edges
        if ((line.x[i + 1] ?? x) < x0 || (line.x[i - 1] ?? x) > x1) return;
        const y = height(line.y[i]);
        kept.push([x, y]);
        if (x >= x0 && x <= x1) { y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
      });
      return kept;
    });
    if (!(y1 > y0)) {
      const y = Number.isFinite(y0) ? y0 : 0, room = Math.abs(y) / 2 || 0.5;
      y0 = y - room; y1 = y + room;
    }
    const px = (x) => L + (x - x0) / Math.max(x1 - x0, 1e-9) * (W - L - R);
    const py = (y) => T + (1 - (y - y0) / (y1 - y0)) * (H - T - B);
    const fresh = make("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": chart.title});
    const clip = make("clipPath", {id: "clip-" + index}, fresh);
    make("rect", {x: L, y: 0, width: W - L - R, height: H - B + 4}, clip);
    for (const v of chart.log ? ticks(10 ** y0, 10 ** y1, true) : ticks(y0, y1)) {
      const y = py(height(v));
      make("line", {class: "grid", x1: L, x2: W - R, y1: y, y2: y}, fresh);
      make("text", {class: "tick", x: L - 6, y: y + 4, "text-anchor": "end"}, fresh).textContent = number(v);
    }
    for (const x of ticks(x0, x1)) {
      const anchor = px(x) > W - R - 16 ? "end" : "middle";
      make("text", {class: "tick", x: px(x), y: H - 8, "text-anchor": anchor}, fresh).textContent = number(x);
    }
    const curves = make("g", {"clip-path": `url(#clip-${index})`}, fresh);
    chart.lines.forEach((line, i) => {
      const points = shown[i].map(([x, y]) => px(x).toFixed(1) + "," + py(y).toFixed(1)).join(" ");
      make("polyline", {fill: "none", stroke: line.color, "stroke-width": 1.2, points}, curves);
      if (line.dots || shown[i].length === 1)
        for (const [x, y] of shown[i]) make("circle", {cx: px(x), cy: py(y), r: 3, fill: line.color}, curves);
    });
    zoom = make("rect", {class: "zoom", y: T, height: H - T - B, width: 0}, fresh);
    cursor = make("line", {class: "cursor", y1: T, y2: H - B, visibility: "hidden"}, fresh);
    figure.replaceChild(fresh, figure.querySelector("svg"));
    svg = fresh;
    const at = (x) => px(x);
    svg.addEventListener("pointermove", (event) => {
      const x = step(event);
      cursor.setAttribute("x1", at(x)); cursor.setAttribute("x2", at(x)); cursor.setAttribute("visibility", "visible");
      if (from !== null) {
        zoom.setAttribute("x", at(Math.min(from, x))); zoom.setAttribute("width", Math.abs(at(x) - at(from)));
      }
      value.textContent = "step " + Math.round(x) + " · " + chart.lines.filter((line) => line.x.length).map((line) => {
        const i = nearest(line.x, x);
        return line.name + " " + number(line.y[i]);
      }).join(" · ");
    });
    svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); value.textContent = ""; });
    svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") from = step(event); });
    svg.addEventListener("pointerup", (event) => {
      const to = step(event), began = from;
      from = null;
      if (began !== null && Math.abs(at(to) - at(began)) > 8) {
        [x0, x1] = [Math.min(began, to), Math.max(began, to)];
        draw();
      }
    });
    svg.addEventListener("dblclick", () => { [x0, x1] = whole; draw(); });
  };
  draw();
});
