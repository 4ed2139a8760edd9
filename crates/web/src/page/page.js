// The page: asks for what is shown every second, and changes only what has changed.

import { Chart, count, html, rate, size, spark, time, words } from "/charts.js";

const LIVE_MS = 1000;
const MINUTES_MS = 10_000;
const LOOK_MS = 3000;
const MAX_DEPTH = 5;
const STATES = { in_force: "in force", waiting: "waiting", broken: "broken", detached: "detached", no_fq: "no fq" };

const at = (id) => document.getElementById(id);
let live = null;
let minutes = {};
const rows = new Map();
/// Rows out of sight are brought up to date when they come into it: a thousand limits cost as much as a screenful.
const sight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const row = rows.get(target.dataset.name);
    if (row?.body !== target) continue;
    row.seen = isIntersecting;
    if (isIntersecting) showRow(row);
  }
});

async function get(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

/// Sets text, and the number behind it, only where they differ.
function put(element, text, value) {
  if (element.textContent !== text) element.textContent = text;
  const raw = value == null ? "" : String(value);
  if (value !== undefined && element.dataset.value !== raw) element.dataset.value = raw;
}

const directions = (limit) => ["egress", "ingress"].filter((name) => limit[name]);
const used = (limit) => Math.max(0, ...directions(limit).map((name) => limit[name].used_bit_s ?? 0));
const fullness = (limit) =>
  Math.max(0, ...directions(limit).map((name) => (limit[name].used_bit_s ?? 0) / limit[name].may_use_bit_s));
const link = (name) => `#/limit/${encodeURIComponent(name)}`;

const plain = (text) => text.replaceAll("`", "");
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/// Limits in the order of their trees, each with how many it is inside of.
function asTree(limits) {
  const names = new Set(limits.map((limit) => limit.name));
  const below = new Map();
  for (const limit of limits) {
    const parent = names.has(limit.parent) ? limit.parent : null;
    if (!below.has(parent)) below.set(parent, []);
    below.get(parent).push(limit);
  }
  const found = [];
  const add = (parent, depth) => {
    for (const limit of below.get(parent) ?? []) {
      found.push([limit, depth]);
      if (depth < MAX_DEPTH) add(limit.name, depth + 1);
    }
  };
  add(null, 0);
  return found;
}

function chosen() {
  const wanted = at("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (limit) => {
    const text = `${limit.name} ${STATES[limit.state] ?? limit.state} ${limit.on} ${limit.scheme ?? ""}`.toLowerCase();
    return wanted.every((word) => text.includes(word));
  };
  const order = at("order").value;
  if (order === "tree") return asTree(live.limits).filter(([limit]) => matches(limit));
  const by = order === "used" ? used : fullness;
  return live.limits.filter(matches).sort((a, b) => by(b) - by(a)).map((limit) => [limit, 0]);
}

/// The rows of a limit: one for each direction, or one that says its state.
function makeRow(limit) {
  const body = html("tbody", {});
  const anchor = html("a", { href: link(limit.name) }, limit.name);
  const chip = html("span", { class: "chip" });
  const on = html("span", { class: "on" });
  const shown = directions(limit);
  const name = html("th", { scope: "rowgroup", class: "name", rowspan: Math.max(1, shown.length) }, anchor, " ", chip, on);
  const cells = {};
  for (const direction of shown.length ? shown : [null]) {
    const row = html("tr", {});
    if (!body.firstChild) row.append(name);
    if (direction) {
      const fill = html("div", { class: "fill" });
      const value = html("span", { class: "value" });
      const meter = html("div", { class: `meter ${direction}` }, value, html("div", { class: "track" }, fill));
      const numbers = ["rate", "flows", "queue", "passed", "dropped"].map((key) =>
        html("td", { class: `number ${key}${key === "queue" ? " wide" : ""}` }));
      const line = html("td", { class: `spark ${direction}` });
      row.append(html("td", { class: `direction ${direction}` }, direction), html("td", { class: "used" }, meter), ...numbers,
        line);
      const [rates, flows, queue, passed, dropped] = numbers;
      cells[direction] = { fill, value, rates, flows, queue, passed, dropped, line };
    } else {
      row.append(html("td", { colspan: 8, class: "note" }));
    }
    body.append(row);
  }
  body.dataset.name = limit.name;
  sight.observe(body);
  return { body, anchor, chip, on, name, cells, shape: shown.join(), seen: true };
}

function showRow(row) {
  const { limit, depth } = row;
  row.name.className = `name depth${depth}`;
  const state = STATES[limit.state] ?? limit.state;
  const tone = limit.state === "in_force" ? "good" : limit.state === "waiting" ? "wait" : "bad";
  put(row.chip, state, limit.state);
  row.chip.className = `chip ${tone}`;
  put(row.on, [plain(limit.on), limit.scheme].filter(Boolean).join(" · "));
  row.on.title = row.on.textContent;
  for (const [direction, cell] of Object.entries(row.cells)) {
    const is = limit[direction];
    put(cell.value, rate(is.used_bit_s), is.used_bit_s);
    const part = Math.min(100, (100 * (is.used_bit_s ?? 0)) / Math.max(1, is.may_use_bit_s));
    const width = `${part.toFixed(0)}%`;
    if (cell.fill.style.width !== width) cell.fill.style.width = width;
    put(cell.rates, rate(is.rate_bit_s), is.rate_bit_s);
    const may = is.may_use_bit_s < is.rate_bit_s ? `may use ${rate(is.may_use_bit_s)} now` : "";
    if (cell.rates.title !== may) cell.rates.title = may;
    put(cell.flows, count(is.flows), is.flows);
    put(cell.queue, time(Math.max(0, is.backlog_ns)));
    put(cell.passed, size(is.passed_bytes), is.passed_bytes);
    put(cell.dropped, count(is.dropped_packets), is.dropped_packets);
    cell.dropped.classList.toggle("drops", is.dropped_packets > 0);
  }
  sparkRow(row);
}

function showLimits() {
  const table = at("limits");
  const list = chosen();
  table.hidden = list.length === 0;
  const agent = live.agent ? "" : " The agent has not run since this host started.";
  at("empty").hidden = list.length > 0;
  put(at("empty"), live.limits.length ? "No limit matches." : `There are no limits on this host.${agent}`);
  const known = new Set();
  let before = table.tHead;
  for (const [limit, depth] of list) {
    known.add(limit.name);
    let row = rows.get(limit.name);
    if (row && row.shape !== directions(limit).join()) {
      dropRow(limit.name, row);
      row = null;
    }
    if (!row) {
      row = makeRow(limit);
      rows.set(limit.name, row);
    }
    Object.assign(row, { limit, depth });
    if (row.seen) showRow(row);
    if (before.nextSibling !== row.body) before.after(row.body);
    before = row.body;
  }
  for (const [name, row] of rows) {
    if (!known.has(name)) dropRow(name, row);
  }
}

function dropRow(name, row) {
  sight.unobserve(row.body);
  row.body.remove();
  rows.delete(name);
}

/// Draws what has come since it was drawn.
function sparkRow(row) {
  if (row.minutes === minutes) return;
  row.minutes = minutes;
  for (const [direction, cell] of Object.entries(row.cells)) {
    const values = minutes[row.limit.name]?.[direction];
    if (values?.some((value) => value != null)) {
      const most = Math.max(...values.map((value) => value ?? 0));
      spark(cell.line, values, `last hour by the minute, ${rate(most)} at most`);
    }
  }
}

function showSummary() {
  const counts = new Map();
  for (const limit of live.limits) counts.set(limit.state, (counts.get(limit.state) ?? 0) + 1);
  const tones = { in_force: "good", waiting: "wait" };
  const chips = [...counts].map(([state, n]) => [`${n} ${STATES[state] ?? state}`, tones[state] ?? "bad"]);
  if (live.agent) chips.push(live.agent.works ? ["agent works", "good"] : ["agent does not work", "bad"]);
  if (live.fleet) chips.push([`fleet ${live.fleet.cluster}`, live.fleet.alerts.length ? "bad" : "good"]);
  const text = JSON.stringify(chips);
  if (at("summary").dataset.text !== text) {
    at("summary").dataset.text = text;
    at("summary").replaceChildren(...chips.map(([text, tone]) => html("span", { class: `chip ${tone}` }, text)));
  }
  put(at("host"), live.host);
  put(at("clock"), new Date(live.unix_ns / 1e6).toLocaleTimeString());
}

/// What is broken or waits stands on top. It changes only when it differs, so that it is read out once.
function showAttention(failed) {
  const list = [];
  if (failed) list.push(["bad", failed]);
  for (const text of [...(live?.alarms ?? []), ...(live?.fleet?.alerts ?? [])]) list.push(["bad", text]);
  for (const text of live?.waiting ?? []) list.push(["wait", text]);
  const text = JSON.stringify(list);
  if (at("attention").dataset.text === text) return;
  at("attention").dataset.text = text;
  const items = list.map(([tone, text]) =>
    html("li", { class: tone }, html("strong", {}, tone === "bad" ? "Warning: " : "Waiting: "), ...words(text)));
  at("attention").replaceChildren(...(items.length ? [html("ul", {}, ...items)] : []));
}

function showFleet() {
  const fleet = live.fleet;
  at("fleet").hidden = !fleet;
  if (!fleet) return;
  const up = fleet.peers.filter((peer) => peer.up).length;
  put(at("fleet-node"), `Node ${fleet.node} of ${fleet.cluster}: ${up} of ${fleet.peers.length} peers answer`);
  at("groups").replaceChildren(...fleet.groups.map((group) => {
    const own = { node: fleet.node, share_bit_s: group.share_bit_s, demand_bit_s: group.demand_bit_s, age_ns: 0 };
    const hosts = [own, ...group.members].sort((a, b) => a.node.localeCompare(b.node));
    const total = Math.max(group.rate_bit_s, hosts.reduce((sum, host) => sum + host.share_bit_s, 0));
    const said = hosts.map((host) => `${host.node} ${rate(host.share_bit_s)}`).join(", ");
    const parts = html("div", { class: "parts", role: "img", "aria-label": `parts of ${rate(group.rate_bit_s)}: ${said}` });
    const lines = hosts.map((host, n) => {
      const part = html("div", { class: `part part${n % 6}` });
      part.style.width = `${(100 * host.share_bit_s) / total}%`;
      parts.append(part);
      const share = html("td", { class: "number" }, rate(host.share_bit_s));
      share.dataset.value = host.share_bit_s;
      return html("tr", {},
        html("th", { scope: "row" }, html("span", { class: `dot part${n % 6}` }),
          host.node + (host.node === fleet.node ? " (this host)" : "") + (host.differs ? ", other settings" : "")),
        share, html("td", { class: "number" }, rate(host.demand_bit_s)),
        html("td", { class: "number" }, host.age_ns ? time(host.age_ns) : "now"));
    });
    const state = html("span", { class: `chip ${group.state === "sharing" ? "good" : "bad"}` }, group.state.replace("_", " "));
    const limits = group.limits.flatMap(({ limit }, n) => [n ? ", " : "", html("a", { href: link(limit) }, limit)]);
    return html("article", { class: "card" },
      html("div", { class: "head" }, html("h2", {}, `${group.name}: ${rate(group.rate_bit_s)} ${group.direction}`), state),
      html("p", { class: "note" }, `divided by ${group.algorithm}, limits here: `, ...limits), parts,
      html("table", {},
        html("thead", {}, html("tr", {}, ...["Host", "Part", "Demand", "Heard"].map((head, n) =>
          html("th", { scope: "col", class: n ? "number" : "" }, head)))),
        html("tbody", {}, ...lines)));
  }));
}

/// One limit, closely.
const detail = {
  name: null, seconds: 300, charts: {}, history: {}, look: null, timers: [],

  open(name) {
    this.close();
    this.name = name;
    const back = html("a", { href: "#/" }, "← All limits");
    this.title = html("h1", { id: "detail-title", tabindex: "-1" }, name);
    this.about = html("p", { class: "note" });
    this.verdicts = html("div", { class: "card", role: "status" }, html("p", { class: "note" }, "Looking at its flows…"));
    this.directions = html("div", {});
    this.flows = html("div", { class: "card" });
    at("detail").replaceChildren(back, this.title, this.about, this.verdicts, this.directions, this.flows);
    at("detail").hidden = false;
    at("overview").hidden = true;
    document.title = `${name} – Tidegate ${live?.host ?? ""}`;
    if (live) this.show();
    this.title.focus();
    this.every(LIVE_MS, async () => { this.history = await get(`/api/history/${encodeURIComponent(name)}`); this.draw(); });
    this.every(LOOK_MS, async () => { this.look = await get(`/api/limit/${encodeURIComponent(name)}`); this.showLook(); });
  },

  /// Again and again while this limit is shown, each time after the last answer.
  every(ms, act) {
    const name = this.name;
    const again = async () => {
      try { await act(); } catch (error) { if (this.name === name && !this.look) this.said(error.message); }
      if (this.name === name) this.timers.push(setTimeout(again, ms));
    };
    again();
  },

  close() {
    this.timers.forEach(clearTimeout);
    Object.assign(this, { name: null, charts: {}, history: {}, look: null, timers: [] });
    at("detail").hidden = true;
    at("overview").hidden = false;
    document.title = "Tidegate";
  },

  said(text) {
    this.verdicts.replaceChildren(html("p", { class: "note" }, text));
  },

  show() {
    const limit = live.limits.find((limit) => limit.name === this.name);
    if (!limit) return this.said(`There is no limit ${this.name} on this host now.`);
    const kept = live.agent?.limits.find((l) => l.name === this.name);
    const about = [STATES[limit.state] ?? limit.state, plain(limit.on), limit.scheme && `scheme ${limit.scheme}`,
      limit.parent && `inside ${limit.parent}`, kept?.schedule && `schedule ${kept.schedule}`,
      kept?.next_change && `until ${kept.next_change}, then ${kept.next_rates}`];
    put(this.about, about.filter(Boolean).join(" · "));
    for (const direction of directions(limit)) {
      if (!this.charts[direction]) this.directions.append(this.makeDirection(direction));
      const { facts } = this.charts[direction];
      const is = limit[direction];
      const list = [["Used now", rate(is.used_bit_s), is.used_bit_s], ["Rate", rate(is.rate_bit_s), is.rate_bit_s],
        ["May use now", rate(is.may_use_bit_s), is.may_use_bit_s], ["Flows", count(is.flows), is.flows],
        ["Share of a flow", rate(is.share_bit_s), is.share_bit_s],
        ["Queue", time(Math.max(0, is.backlog_ns)), is.backlog_ns],
        ["Passed", size(is.passed_bytes), is.passed_bytes], ["Dropped", `${count(is.dropped_packets)} packets`, is.dropped_packets]];
      if (!facts.firstChild) facts.append(...list.map(([name]) => html("div", {}, html("dt", {}, name), html("dd", {}))));
      list.forEach(([, text, value], n) => put(facts.children[n].lastChild, text, value));
    }
  },

  makeDirection(direction) {
    const chart = new Chart(direction);
    const facts = html("dl", { class: "cards" });
    const choices = [[300, "5 minutes"], [3600, "1 hour"]].map(([seconds, text]) => {
      const button = html("button", { type: "button", "aria-pressed": seconds === this.seconds }, text);
      button.addEventListener("click", () => {
        this.seconds = seconds;
        document.querySelectorAll("#detail button").forEach((other) =>
          other.setAttribute("aria-pressed", other.textContent === text));
        this.draw();
      });
      return button;
    });
    this.charts[direction] = { chart, facts };
    const legend = html("p", { class: "legend" },
      html("span", { class: direction }, html("span", { class: "key" }), "used"),
      html("span", {}, html("span", { class: "key may" }), "may use"),
      html("span", {}, html("span", { class: "key drop" }), "packets dropped"));
    return html("article", { class: "card" },
      html("div", { class: "head" }, html("h2", { class: direction }, direction), ...choices), facts, chart.root,
      chart.readout, legend);
  },

  draw() {
    // History may come before the first reading.
    if (!live) return;
    const now_s = Math.floor(live.unix_ns / 1e9);
    for (const [direction, { chart }] of Object.entries(this.charts)) {
      const series = this.history[direction] ?? { fine: [], coarse: [] };
      const to = series.coarse.at(-1)?.unix_s ?? 0;
      const points = this.seconds === 300 ? series.fine
        : [...series.coarse, ...series.fine.filter((point) => point.unix_s >= to)];
      chart.draw(points, now_s, this.seconds);
    }
  },

  showLook() {
    const { limit, explanations, cgroups_left_out, errors } = this.look;
    const places = explanations.flatMap((explanation) => explanation.places);
    const lines = places.map((place) => {
      const where = places.length > 1 ? [html("code", {}, place.cgroup || "/"), ": "] : [];
      return html("p", { class: "verdict" }, ...where, ...words(sentence(place.sentence)));
    });
    for (const text of errors) lines.push(html("p", { class: "note" }, text));
    if (cgroups_left_out) lines.push(html("p", { class: "note" }, `and ${cgroups_left_out} cgroups more`));
    if (!lines.length) lines.push(html("p", { class: "note" }, "Traffic of a device belongs to no process of this host."));
    this.verdicts.replaceChildren(html("h2", {}, "What holds it back"), ...lines);
    const parts = [html("h2", {}, "Flows")];
    const sockets = places.flatMap((place) => place.sockets);
    if (sockets.length) parts.push(socketTable(sockets));
    for (const direction of ["egress", "ingress"]) {
      const queue = limit.waiting?.[direction];
      if (queue) parts.push(html("h3", {}, `Packets that wait, ${direction}`), queueTable(queue));
    }
    if (parts.length === 1) parts.push(html("p", { class: "note" }, "No TCP connection now."));
    this.flows.replaceChildren(...parts);
  },
};

function tableOf(heads, lines) {
  const head = heads.map(([text, kind]) => html("th", { scope: "col", class: kind ?? "" }, text));
  const body = lines.map((cells) =>
    html("tr", {}, ...cells.map((cell, n) => html("td", { class: heads[n][1] ?? "" }, cell))));
  return html("div", { class: "scroll" },
    html("table", { class: "flows" }, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...body)));
}

function socketTable(sockets) {
  const held = (socket) => {
    const moved = Math.max(socket.sent_bit_s, socket.received_bit_s);
    if (socket.receiver_limited > 0.5) return "its receiver";
    if (socket.pacing_bit_s && socket.sent_bit_s > 0.85 * socket.pacing_bit_s) return "its share";
    return moved === 0 ? "idle" : socket.busy < 0.8 ? "its program" : "–";
  };
  const heads = [["Process"], ["Connection"], ["Sends", "number"], ["Receives", "number"], ["Paced at", "number"],
    ["Round trip", "number"], ["Sent again", "number"], ["Held by"]];
  return tableOf(heads, sockets.map((socket) => [
    socket.comm ? `${socket.comm} (${socket.pid})` : "–", `${socket.local} → ${socket.remote}`,
    rate(socket.sent_bit_s), rate(socket.received_bit_s), rate(socket.pacing_bit_s), time(socket.rtt_ns),
    count(socket.retransmitted_segments), held(socket)]));
}

function queueTable(queue) {
  const heads = [["Flow"], ["Packets", "number"], ["Bytes", "number"]];
  return tableOf(heads, queue.flows.map((flow) =>
    [`${flow.protocol} ${flow.from} → ${flow.to}`, count(flow.packets), size(flow.bytes)]));
}

function route() {
  const limit = /^#\/limit\/(.+)$/.exec(location.hash)?.[1];
  const before = detail.name;
  if (limit) return detail.open(decodeURIComponent(limit));
  detail.close();
  rows.get(before)?.anchor.focus();
}

async function everyLive() {
  try {
    live = await get("/api/live");
    showAttention(live.failed && `limits cannot be read: ${live.failed}`);
    showSummary();
    if (detail.name) detail.show();
    else [showLimits, showFleet].forEach((show) => show());
    document.body.dataset.ready = "yes";
  } catch (error) {
    showAttention(`nothing new is known: ${error.message}`);
  }
  setTimeout(everyLive, LIVE_MS);
}

async function everyMinutes() {
  try {
    minutes = await get("/api/minutes");
    for (const row of rows.values()) if (row.seen && row.limit) sparkRow(row);
  } catch { /* the other loop says so */ }
  setTimeout(everyMinutes, MINUTES_MS);
}

document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT)$/.test(event.target.tagName);
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/" && !typing && !detail.name) {
    event.preventDefault();
    at("filter").focus();
  } else if (event.key === "Escape" && detail.name) {
    location.hash = "#/";
  } else if (/^Arrow(Up|Down)$/.test(event.key) && !typing && !detail.name) {
    const links = [...document.querySelectorAll("#limits a")];
    const step = event.key === "ArrowDown" ? 1 : -1;
    const next = links[Math.max(0, links.indexOf(document.activeElement) + step)];
    if (next) event.preventDefault();
    next?.focus();
  }
});
at("filter").addEventListener("input", () => live && showLimits());
at("order").addEventListener("change", () => live && showLimits());
window.addEventListener("hashchange", route);
route();
await everyLive();
if (detail.name) detail.show();
everyMinutes();
