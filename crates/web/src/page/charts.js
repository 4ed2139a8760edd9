// Lines over time as SVG. What they show is also said in words, and can be read point by point with the keyboard.

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function html(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const STEPS = ["", "k", "M", "G", "T"];

/// As `tidegate status` writes it: four figures at most.
function scaled(value, base, unit) {
  let step = 0;
  while (value >= base && step < STEPS.length - 1) [value, step] = [value / base, step + 1];
  const digits = step === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${Number(value.toFixed(digits))} ${STEPS[step]}${unit}`;
}

export const rate = (bit_s) => (bit_s == null ? "–" : scaled(bit_s, 1000, "bit/s"));
export const size = (bytes) => scaled(bytes, 1000, "B");
export const count = (n) => (n == null ? "–" : n.toLocaleString("en"));

export function time(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return `${(ns / 1e9).toFixed(1)} s`;
  if (size >= 1e6) return `${(ns / 1e6).toFixed(1)} ms`;
  return `${Math.round(ns / 1e3)} µs`;
}

/// The path of values that are known; a gap ends a line.
function path(points) {
  let text = "", pen = "M";
  for (const [x, y] of points) {
    if (y == null) { pen = "M"; continue; }
    text += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  }
  return text;
}

/// The area below a line whose points are all known.
function area(points, floor) {
  const known = points.filter(([, y]) => y != null);
  if (known.length < 2) return "";
  return `${path(known)}L${known.at(-1)[0].toFixed(1)} ${floor}L${known[0][0].toFixed(1)} ${floor}Z`;
}

/// Text in which names stand in backquotes.
export function words(text) {
  return text.split("`").map((part, n) => (n % 2 ? html("code", {}, part) : part));
}

/// A small picture of an hour: a bar for each minute that is known.
export function spark(element, values, label) {
  const height = 26;
  const most = Math.max(1, ...values.map((value) => value ?? 0));
  let bars = "";
  values.forEach((value, at) => {
    if (value == null) return;
    const tall = Math.max(1, (value / most) * height);
    bars += `M${at * 2} ${height}v${-tall.toFixed(1)}h1.5V${height}Z`;
  });
  if (!element.firstChild) {
    element.append(svg("svg", { viewBox: `0 0 ${values.length * 2} ${height}`, preserveAspectRatio: "none", role: "img" },
      svg("line", { class: "floor", x1: 0, x2: values.length * 2, y1: height, y2: height }), svg("path", { class: "bars" })));
  }
  element.firstChild.setAttribute("aria-label", label);
  element.firstChild.lastChild.setAttribute("d", bars);
}

/// The next round number above a value.
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 1.2, 1.6, 2, 2.4, 3, 4, 6, 8, 10].map((n) => n * power).find((n) => n >= value) ?? value;
}

/// What one direction used and might use in the last `seconds`.
export class Chart {
  constructor(direction) {
    this.direction = direction;
    this.root = html("div", { class: `chart ${direction}`, tabindex: "0", role: "group",
      "aria-label": `${direction} over time; left and right arrows read points` });
    this.readout = html("p", { class: "readout", "aria-live": "polite" });
    this.at = null;
    this.root.addEventListener("pointermove", (event) => this.point(event));
    this.root.addEventListener("pointerleave", () => this.read(null));
    this.root.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step === undefined || !this.points.length) return;
      event.preventDefault();
      this.read(Math.min(Math.max((this.at ?? this.points.length) + step, 0), this.points.length - 1));
    });
  }

  draw(points, now_s, seconds) {
    const [width, height, left, right, top, bottom] = [960, 230, 78, 12, 10, 28];
    this.points = points.filter((point) => point.unix_s > now_s - seconds);
    const used = this.points.map((point) => point.used_bit_s);
    const may = this.points.map((point) => point.may_use_bit_s);
    const most = ceiling(Math.max(1000, ...used, ...may.filter((rate) => rate < 20 * Math.max(1000, ...used))));
    const floor = height - bottom;
    this.x = (unix_s) => left + (1 - (now_s - unix_s) / seconds) * (width - left - right);
    const y = (value) => (value > 1.001 * most ? null : floor - (value / most) * (floor - top));
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    picture.setAttribute("aria-label", this.words(used));
    for (let tick = 0; tick <= 4; tick++) {
      const value = (most * tick) / 4;
      picture.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
        svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, rate(value)));
    }
    const ticks = seconds % 600 ? 5 : 6;
    for (let tick = 0; tick <= ticks; tick++) {
      const ago = seconds * (1 - tick / ticks);
      const label = ago === 0 ? "now" : `−${Math.round(ago / 60)} min`;
      const anchor = tick === ticks ? "end" : "middle";
      picture.append(svg("text", { x: this.x(now_s - ago), y: height - 6, "text-anchor": anchor }, label));
    }
    const line = this.points.map((point) => [this.x(point.unix_s), y(point.used_bit_s)]);
    picture.append(svg("path", { class: "area", d: area(line, floor) }), svg("path", { class: "line", d: path(line) }),
      svg("path", { class: "may", d: path(this.points.map((p) => [this.x(p.unix_s), y(p.may_use_bit_s)])) }));
    for (const point of this.points.filter((point) => point.dropped_packets_s > 0)) {
      const x = this.x(point.unix_s);
      picture.append(svg("line", { class: "drop", x1: x, x2: x, y1: floor, y2: floor + 5 }));
    }
    this.cursor = svg("line", { class: "cursor", y1: top, y2: floor, visibility: "hidden" });
    picture.append(this.cursor);
    this.root.replaceChildren(picture);
    this.picture = picture;
    if (this.at != null) this.read(Math.min(this.at, this.points.length - 1));
  }

  words(used) {
    if (!used.length) return `${this.direction}: nothing is known yet`;
    const mean = used.reduce((sum, value) => sum + value, 0) / used.length;
    return `${this.direction}: ${rate(used.at(-1))} now, ${rate(mean)} on average, ${rate(Math.max(...used))} at most`;
  }

  point(event) {
    if (!this.points?.length) return;
    const box = this.picture.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 960;
    const far = (point) => Math.abs(this.x(point.unix_s) - x);
    this.read(this.points.reduce((best, point, at) => (far(point) < far(this.points[best]) ? at : best), 0));
  }

  read(at) {
    this.at = at;
    const point = at == null ? null : this.points[at];
    if (!point) {
      this.readout.textContent = "";
      this.cursor?.setAttribute("visibility", "hidden");
      return;
    }
    const x = this.x(point.unix_s);
    for (const [key, value] of [["x1", x], ["x2", x], ["visibility", "visible"]]) this.cursor.setAttribute(key, value);
    const clock = new Date(point.unix_s * 1000).toLocaleTimeString();
    const drops = point.dropped_packets_s > 0 ? `, ${point.dropped_packets_s.toFixed(1)} packets dropped a second` : "";
    this.readout.textContent = `${clock}: used ${rate(point.used_bit_s)} of ${rate(point.may_use_bit_s)}${drops}`;
  }
}
