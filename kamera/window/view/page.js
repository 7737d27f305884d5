"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";

  // -- words ------------------------------------------------------------------------------------

  const GUARANTEES = {
    exact: "equal to a prefill of this very window",
    patched: "stored copy and a patch, formed behind the chunks in front of it",
    orbit: "stored copy and a patch that is the mean over orders of the chunks in front",
    survivor: "was exact or patched; it still knows a chunk that has left",
    near: "stored copy and a patch that was formed behind other, related chunks",
    blind: "stored copy alone: it knows nothing of the chunks in front",
  };
  const HOW = {
    prefilled: ["ran", "its tokens run through the model"],
    patched: ["patched", "its stored copy and a stored patch serve: nothing runs"],
    stored: ["stored", "its stored copy serves as it is: nothing runs"],
    moved: ["moved", "the same KV at another place: nothing runs"],
  };
  const REASONS = {
    "new": "seen for the first time",
    edited: "it begins as a text that stood here; its end is new",
    policy: "this policy serves no stored patch",
    glue: "a text too short to keep",
    "no canonical": "no copy of it was stored yet",
    "no patch": "no patch was stored behind the chunks in front",
    refused: "its stored patch was refused",
    budget: "its stored patch is smaller than this policy asks for",
    "": "its stored KV could not be used",
  };
  const TIERS = [
    ["live KV", "live"], ["copies that moves start from", "copies"],
    ["encodings", "encodings"], ["objects in the store's memory", "store"],
  ];
  const PARTS = [
    ["plan", "survivor"], ["encode", "orbit"], ["run", "patched"], ["show", "exact"],
  ];

  const number = (n) => n.toLocaleString("en");
  const rough = (n) => n.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
  const count = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;
  const short = (id) => id.slice(0, 8);
  const bytes = (n) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let i = 0;
    while (n >= 1024 && i < 4) { n /= 1024; i++; }
    return `${i ? n.toFixed(n < 10 ? 1 : 0) : n} ${units[i]}`;
  };
  const seconds = (s) => s < 1 ? `${(1000 * s).toFixed(s < 0.01 ? 1 : 0)} ms`
    : s < 120 ? `${s.toFixed(1)} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
  const times = (a, b) => a > 0 ? `${(b / a).toFixed(b / a < 10 ? 1 : 0)}×` : "";

  // -- elements: text is always a text node ---------------------------------------------------------

  const html = (tag, attributes = {}, ...inside) => fill(document.createElement(tag), attributes, inside);
  const svg = (tag, attributes = {}, ...inside) => fill(document.createElementNS(SVG, tag), attributes, inside);
  function fill(made, attributes, inside) {
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...inside);
    return made;
  }
  const colour = (name) => `var(--${name})`;

  // -- what is shown --------------------------------------------------------------------------------

  let lives = [], life = null, fields = {}, guarantees = [];
  let chosen = 0, width = 64, following = true;
  const ROW = 46, HEAD = 42, FOOT = 92;

  function read(given) {
    ({ fields, guarantees } = given);
    const name = life && life.name;
    const rows = (kind, values) => values.map((row) => {
      const made = {};
      fields[kind].forEach((field, i) => { made[field] = row[i]; });
      return made;
    });
    for (const told of given.lives) {
      const each = {
        ...told, lanes: rows("lane", told.lanes), deeds: rows("deed", told.deeds),
        spans: rows("span", told.spans), marks: rows("mark", told.marks),
      };
      each.marksAt = each.deeds.map(() => []);
      each.marks.forEach((mark) => each.marksAt[mark.operation].push(mark));
      each.spansOf = each.lanes.map(() => []);
      each.spans.forEach((span) => each.spansOf[span.lane].push(span));
      const at = lives.findIndex((old) => old.name === each.name);
      lives.splice(at < 0 ? lives.length : at, 1, each);
    }
    life = lives.find((each) => each.name === name) || lives[0] || null;
  }

  const sum = (values) => values.reduce((total, n) => total + n, 0);
  const known = (lanes) => lanes.map((lane) => `${nameOf(life.lanes[lane])} ${short(life.lanes[lane].chunk_id)}`).join(", ");
  const nameOf = (lane) => lane.label.replace(/^(<(image|video)>)+/, "").replace(/\s+/g, " ").trim() || short(lane.chunk_id);
  const picture = (lane) => lane.picture ? `data:image/jpeg;base64,${lane.picture}` : "";
  const spanAt = (lane, operation) =>
    life.spansOf[lane].find((span) => span.first <= operation && operation <= span.last);

  function shades() {
    // patterns tell the weaker guarantees apart without their colours
    const made = svg("defs");
    const lines = (id, turn, gap) => svg("pattern", {
      id, width: gap, height: gap, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${turn})`,
    }, svg("rect", { width: 2, height: gap, fill: "var(--card)", "fill-opacity": .45 }));
    made.append(lines("stripes", 45, 8), lines("dense", -45, 5));
    return made;
  }
  function bar(x, y, w, h, guarantee, clean) {
    const drawn = svg("g");
    const hollow = guarantee === "blind" || clean;
    drawn.append(svg("rect", {
      x, y, width: Math.max(w, 3), height: h, rx: 6, fill: colour(guarantee),
      "fill-opacity": hollow ? .3 : 1, stroke: colour(guarantee), "stroke-width": hollow ? 1.5 : 0,
      "stroke-dasharray": clean ? "4 3" : "none",
    }));
    const pattern = { survivor: "stripes", near: "dense", orbit: "stripes" }[guarantee];
    if (pattern) drawn.append(svg("rect", { x, y, width: Math.max(w, 3), height: h, rx: 6, fill: `url(#${pattern})` }));
    return drawn;
  }
  function glyph(how, x, y, tokens) {
    const drawn = svg("g");
    if (how === "prefilled") {
      const text = tokens > 9999 ? `${Math.round(tokens / 1000)}k` : String(tokens);
      const w = 9 + 7 * text.length, filled = how === "prefilled";
      drawn.append(svg("rect", {
        x: x - w / 2, y: y - 9, width: w, height: 18, rx: 9, fill: filled ? "var(--ink)" : "var(--card)",
        stroke: filled ? "var(--card)" : "var(--ink)", "stroke-width": 1.5, "stroke-dasharray": filled ? "none" : "3 2",
      }));
      drawn.append(svg("text", {
        x, y: y + 4, "text-anchor": "middle", class: "small strong", style: `fill:var(--${filled ? "card" : "ink"})`,
      }, text));
    } else {
      const signs = { patched: "+", stored: "=", moved: "→" };
      drawn.append(svg("circle", { cx: x, cy: y, r: 9, fill: "var(--card)" }), svg("text", {
        x, y: y + 5, "text-anchor": "middle", class: "strong", style: "font-size:14px",
      }, signs[how] || ""));
    }
    return drawn;
  }

  // -- the head of the page -------------------------------------------------------------------------

  function rivals(into, entries) {
    const most = Math.max(1, ...entries.map((entry) => entry.value));
    into.replaceChildren(...entries.map((entry) => html("div", { class: entry.ours ? "rival ours" : "rival" },
      html("span", { class: "name" }, entry.name),
      html("span", { class: "track" },
        html("span", {
          class: "fill",
          style: `background:${colour(entry.fill)};width:calc((100% - 9em) * ${entry.value / most})`,
        }),
        html("span", { class: "value" }, number(entry.value), entry.note ? html("span", { class: "quiet", style: "font-size:13px;font-weight:400" }, ` ${entry.note}`) : "")),
    )));
  }

  function headline() {
    const deeds = life.deeds, ran = sum(deeds.map((d) => d.tokens));
    const prefix = sum(deeds.map((d) => d.prefix[0])), whole = sum(deeds.map((d) => d.whole[0]));
    const spell = deeds[deeds.length - 1].time - deeds[0].time;
    $("when").textContent = `${count(deeds.length, "operation")} on ${count(life.lanes.length, "chunk")}`
      + (spell >= 1 ? ` in ${seconds(spell)}` : "") + (doc.live ? " · live" : "");
    rivals($("bars"), [
      { name: "Kamera", value: ran, fill: "accent", ours: true },
      { name: "a prefix cache", value: prefix, fill: "rival", note: ran ? times(ran, prefix) : "" },
      { name: "prefilling everything", value: whole, fill: "whole", note: ran ? times(ran, whole) : "" },
    ]);
    $("remark").textContent = `${number(life.later[1])} more tokens ran as later work, off the path of any answer `
      + "(stored copies, patches, audits). The prefix cache is one for this window alone, and it forgets nothing.";
    const marks = life.marks, served = marks.filter((m) => m.how !== "prefilled").length;
    const again = marks.filter((m) => m.how === "prefilled" && m.reason !== "new").length;
    const encodes = sum(deeds.map((d) => d.encodes));
    const tile = (value, ...lines) => html("div", { class: "tile" }, html("b", {}, value),
      ...lines.map((line) => html("span", {}, line)));
    $("tiles").replaceChildren(
      tile(number(encodes), "vision encodes", `prefix cache ${number(sum(deeds.map((d) => d.prefix[1])))}, everything ${number(sum(deeds.map((d) => d.whole[1])))}`),
      tile(number(sum(deeds.map((d) => d.forwards))), "forwards before answers", `${number(life.later[0])} later`),
      tile(served + again ? `${Math.round(100 * served / (served + again))} %` : "–", "placed anew without running", `${number(served)} of ${number(served + again)} chunks that came back or moved`),
      tile(seconds(sum(deeds.map((d) => d.seconds))), "in all operations", `longest ${seconds(Math.max(...deeds.map((d) => d.seconds)))}`),
    );
  }

  function thin(values, most) {
    // an increasing line of few points, its end included
    const step = Math.max(1, Math.ceil(values.length / most)), kept = [];
    for (let i = 0; i < values.length; i += step) kept.push([i, values[i]]);
    if ((values.length - 1) % step) kept.push([values.length - 1, values[values.length - 1]]);
    return kept;
  }

  function growth() {
    const drawing = $("growth"), w = drawing.clientWidth || 400, h = drawing.clientHeight || 170;
    const deeds = life.deeds, right = 118, top = 26, bottom = 20;
    const lines = [
      ["everything", "whole", deeds.map((d) => d.whole[0])],
      ["prefix cache", "rival", deeds.map((d) => d.prefix[0])],
      ["Kamera", "accent", deeds.map((d) => d.tokens)],
    ].map(([name, fill, each]) => { let total = 0; return { name, fill, values: each.map((n) => (total += n)) }; });
    const most = Math.max(1, ...lines.map((line) => line.values[deeds.length - 1]));
    const x = (i) => 4 + (deeds.length > 1 ? i / (deeds.length - 1) : 1) * (w - right - 8);
    const y = (n) => h - bottom - (n / most) * (h - top - bottom);
    drawing.setAttribute("viewBox", `0 0 ${w} ${h}`);
    drawing.replaceChildren(svg("line", { x1: 0, x2: w - right, y1: y(0), y2: y(0), stroke: "var(--line)" }));
    drawing.append(svg("line", { id: "cursor", x1: x(chosen), x2: x(chosen), y1: top, y2: y(0), stroke: "var(--focus)", "stroke-dasharray": "3 3" }));
    let floor = h;
    for (const line of [...lines].sort((a, b) => a.values[deeds.length - 1] - b.values[deeds.length - 1])) {
      const last = line.values[deeds.length - 1];
      const points = thin(line.values, 500).map(([i, n]) => `${x(i).toFixed(1)},${y(n).toFixed(1)}`).join(" ");
      drawing.append(svg("polyline", { points, fill: "none", stroke: colour(line.fill), "stroke-width": line.name === "Kamera" ? 3 : 2, "stroke-linejoin": "round" }));
      floor = Math.min(floor - 15, y(last) + 4);
      drawing.append(svg("text", { x: w - right + 6, y: floor, class: line.name === "Kamera" ? "small strong" : "small quiet" }, `${line.name} ${rough(last)}`));
    }
    drawing.append(svg("text", { x: 4, y: h - 5, class: "small quiet" }, "first operation"));
    drawing.append(svg("text", { x: w - right - 4, y: h - 5, class: "small quiet", "text-anchor": "end" }, "last"));
    drawing.onclick = (event) => {
      const at = (event.clientX - drawing.getBoundingClientRect().left - 4) / (w - right - 8);
      choose(Math.round(at * (deeds.length - 1)));
    };
  }

  function legend() {
    const seen = new Set(life.spans.map((span) => span.guarantee));
    const ways = new Set(life.marks.map((mark) => mark.how));
    const item = (drawing, name, text) => {
      const made = html("span", { class: "item" }, drawing, name);
      hint(made, () => [name, text]);
      return made;
    };
    $("legend").replaceChildren(
      ...guarantees.filter((name) => seen.has(name)).map((name) =>
        item(svg("svg", { width: 30, height: 16 }, bar(0, 1, 30, 14, name, false)), name, GUARANTEES[name])),
      html("span", { class: "gap" }),
      ...Object.keys(HOW).filter((how) => ways.has(how)).map((how) => {
        const drawing = svg("svg", { width: 34, height: 20 });
        if (how !== "prefilled") drawing.append(svg("rect", { x: 3, y: 0, width: 28, height: 20, rx: 6, fill: "var(--rival)" }));
        drawing.append(glyph(how, 17, 10, 96));
        return item(drawing, how === "prefilled" ? "tokens that ran" : HOW[how][0], HOW[how][1]);
      }),
      item(svg("svg", { width: 34, height: 20 }, ...strip({ prefix: [60], whole: [100], tokens: 25 }, 17, 19, 18 / 100, 24)),
        "ran, of a prefix cache, of everything", "the bars below each operation: what ran, what a prefix cache would have run, and a prefill of everything"),
    );
  }

  function strip(deed, x, foot, scale, w) {
    const made = [];
    const put = (value, wide, fill) => {
      if (value) made.push(svg("rect", { x: x - wide / 2, y: foot - Math.max(1, value * scale), width: wide, height: Math.max(1, value * scale), rx: 2, fill: colour(fill) }));
    };
    put(deed.whole[0], w, "whole");
    put(deed.prefix[0], w * .62, "rival");
    put(deed.tokens, w * .28, "accent");
    return made;
  }

  // -- lanes: only what is in sight is drawn ----------------------------------------------------------

  const grid = $("grid"), lanes = $("lanes"), sizer = $("sizer");
  let drawn = 0;
  const soon = () => { drawn = drawn || requestAnimationFrame(() => { drawn = 0; draw(); }); };

  function draw() {
    const n = life.deeds.length, narrow = grid.clientWidth < 560, gutter = narrow ? 96 : 232;
    const wide = grid.clientWidth, sight = wide - gutter;
    sizer.style.width = `${gutter + n * width}px`;
    const from = Math.max(0, Math.floor(grid.scrollLeft / width)), to = Math.min(n - 1, Math.ceil((grid.scrollLeft + sight) / width));
    const shown = new Map();
    for (const span of life.spans) {
      if (span.first > to) break;
      if (span.last >= from) (shown.get(span.lane) || shown.set(span.lane, []).get(span.lane)).push(span);
    }
    const list = [...shown.keys()].sort((a, b) => a - b);
    const tall = HEAD + list.length * ROW + FOOT;
    sizer.style.height = `${tall}px`;
    grid.style.height = `${Math.min(tall + 16, Math.max(300, innerHeight * .72))}px`;
    $("detail").style.maxHeight = innerWidth > 760 ? `${Math.max(460, grid.offsetHeight)}px` : "none";
    const high = Math.min(tall, grid.clientHeight), body = high - FOOT;
    const top = Math.min(grid.scrollTop, Math.max(0, tall - high));
    lanes.setAttribute("width", wide);
    lanes.setAttribute("height", high);
    const x = (operation) => gutter + operation * width - grid.scrollLeft;
    const all = [shades(), svg("clipPath", { id: "right" }, svg("rect", { x: gutter, y: 0, width: Math.max(0, sight), height: high })),
      svg("clipPath", { id: "middle" }, svg("rect", { x: gutter, y: HEAD, width: Math.max(0, sight), height: Math.max(0, body - HEAD) })),
      svg("clipPath", { id: "lefts" }, svg("rect", { x: 0, y: HEAD, width: gutter - 8, height: Math.max(0, body - HEAD) }))];
    const right = svg("g", { "clip-path": "url(#right)" }), middle = svg("g", { "clip-path": "url(#middle)" }), left = svg("g", { "clip-path": "url(#lefts)" });
    right.append(svg("rect", { x: x(chosen), y: 0, width, height: high, fill: "var(--chosen)" }));
    const first = Math.max(0, Math.floor(top / ROW)), last = Math.min(list.length - 1, Math.ceil((top + body - HEAD) / ROW));
    const marked = new Map();
    for (let operation = from; operation <= to; operation++) {
      for (const mark of life.marksAt[operation]) (marked.get(mark.lane) || marked.set(mark.lane, []).get(mark.lane)).push(mark);
    }
    for (let i = first; i <= last; i++) {
      const lane = life.lanes[list[i]], y = HEAD + i * ROW - top, mid = y + ROW / 2;
      middle.append(svg("line", { x1: gutter, x2: wide, y1: y + ROW, y2: y + ROW, stroke: "var(--faint)" }));
      for (const span of shown.get(list[i])) {
        const before = life.spansOf[list[i]].find((other) => other.last + 1 === span.first);
        const after = life.spansOf[list[i]].find((other) => other.first - 1 === span.last);
        const a = x(Math.max(span.first, from - 1)) + (before || span.first < from ? 1 : 7);
        const b = x(Math.min(span.last, to + 1) + 1) - (after || span.last > to ? 1 : 7);
        middle.append(bar(a, mid - 12, b - a, 24, span.guarantee, span.clean));
      }
      for (const mark of marked.get(list[i]) || []) middle.append(glyph(mark.how, x(mark.operation) + width / 2, mid, mark.tokens));
      const source = picture(lane), at = narrow ? 8 : 14;
      left.append(svg("rect", { x: at, y: y + 6, width: 34, height: 34, rx: 6, fill: "var(--faint)" }));
      if (source) left.append(svg("image", { href: source, x: at, y: y + 6, width: 34, height: 34, preserveAspectRatio: "xMidYMid slice" }));
      left.append(svg("text", { x: at + 43, y: y + 20 }, narrow ? short(lane.chunk_id).slice(0, 5) : nameOf(lane).slice(0, 60)));
      left.append(svg("text", { x: at + 43, y: y + 35, class: "small quiet" }, narrow ? number(lane.tokens) : `${nameOf(lane) === short(lane.chunk_id) ? "" : `${short(lane.chunk_id)} · `}${count(lane.tokens, "token")}`));
    }
    const most = life.most || (life.most = life.deeds.reduce((m, d) => Math.max(m, d.whole[0], d.prefix[0], d.tokens), 1));
    const foot = high - 12, scale = (FOOT - 40) / most;
    const step = width < 30 ? Math.ceil(60 / width) : 1;
    right.append(svg("line", { x1: gutter, x2: wide, y1: body, y2: body, stroke: "var(--line)" }), svg("line", { x1: gutter, x2: wide, y1: HEAD, y2: HEAD, stroke: "var(--line)" }));
    for (let operation = from; operation <= to; operation++) {
      const deed = life.deeds[operation], mid = x(operation) + width / 2;
      if (operation % step === 0) {
        const room = Math.max(3, Math.floor(width * step / 7));
        right.append(svg("text", { x: mid, y: 18, "text-anchor": "middle", class: operation === chosen ? "strong" : "" }, deed.name.length > room ? `${deed.name.slice(0, room - 1)}…` : deed.name));
        right.append(svg("text", { x: mid, y: 33, "text-anchor": "middle", class: "small quiet" }, String(operation + 1)));
      }
      right.append(...strip(deed, mid, foot, scale, Math.min(30, width - 4)));
      if (width >= 40) right.append(svg("text", { x: mid, y: body + 16, "text-anchor": "middle", class: "small strong", style: "fill:var(--accent)" }, number(deed.tokens)));
    }
    const aside = narrow ? ["tokens"] : ["tokens run", "beside a prefix cache", "and everything"];
    const labels = aside.map((text, i) => svg("text", { x: narrow ? 8 : 14, y: body + 18 + 16 * i, class: i ? "small quiet" : "small strong" }, text));
    lanes.replaceChildren(...all, right, middle, left, ...labels, svg("line", { x1: gutter, x2: gutter, y1: 0, y2: high, stroke: "var(--line)" }));
    scene = { gutter, list, top, body, x };
  }
  let scene = null;

  function under(event) {
    const box = lanes.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const operation = Math.floor((px - scene.gutter + grid.scrollLeft) / width);
    const row = Math.floor((py - HEAD + scene.top) / ROW);
    return {
      operation: px >= scene.gutter && operation < life.deeds.length ? operation : null,
      lane: py >= HEAD && py < scene.body && row < scene.list.length ? scene.list[row] : null,
    };
  }

  function choose(operation, scroll = true) {
    chosen = Math.max(0, Math.min(life.deeds.length - 1, operation));
    following = chosen === life.deeds.length - 1;
    if (scroll) {
      const gutter = grid.clientWidth < 560 ? 96 : 232, sight = grid.clientWidth - gutter;
      if (chosen * width < grid.scrollLeft) grid.scrollLeft = chosen * width;
      if ((chosen + 1) * width > grid.scrollLeft + sight) grid.scrollLeft = (chosen + 1) * width - sight;
    }
    detail();
    growth();
    draw();
    if (scroll && bring(life.deeds[chosen].order)) draw();
  }

  function bring(order) {
    // the rows of the chosen operation come into sight, the last ones first
    const rows = order.map((lane) => scene.list.indexOf(lane)).filter((row) => row >= 0);
    const high = scene.body - HEAD, before = grid.scrollTop;
    if (!rows.length) return false;
    const low = (Math.max(...rows) + 1) * ROW, up = Math.min(...rows) * ROW;
    if (low > scene.top + high) grid.scrollTop = low - high;
    else if (up < scene.top) grid.scrollTop = up;
    return grid.scrollTop !== before;
  }

  grid.addEventListener("scroll", soon, { passive: true });
  grid.addEventListener("click", (event) => {
    const { operation } = under(event);
    if (operation !== null) choose(operation, false);
  });
  grid.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor((grid.clientWidth - 232) / width));
    const to = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: life.deeds.length - 1, PageUp: chosen - page, PageDown: chosen + page }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (to !== undefined) choose(to);
    else if (event.key === "+" || event.key === "=") zoom(1.25);
    else if (event.key === "-") zoom(.8);
    else return;
    event.preventDefault();
  });
  let zoomed = false;
  function zoom(by) {
    zoomed = true;
    width = Math.max(8, Math.min(140, width * by));
    draw();
    choose(chosen);
  }

  // -- hints -------------------------------------------------------------------------------------------

  const tip = $("tip");
  function show(event, lines) {
    if (!lines) { tip.hidden = true; return; }
    tip.replaceChildren(html("b", {}, lines[0]), ...lines.slice(1).filter(Boolean).map((line) => html("div", {}, line)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18}px`;
  }
  function hint(element, lines) {
    element.addEventListener("pointermove", (event) => show(event, lines()));
    element.addEventListener("pointerleave", () => show(null, null));
  }
  grid.addEventListener("pointerleave", () => show(null, null));
  grid.addEventListener("pointermove", (event) => {
    const { operation, lane } = under(event);
    if (lane === null && operation !== null) {
      const deed = life.deeds[operation];
      return show(event, [`${operation + 1}. ${deed.name}`, `${count(deed.tokens, "token")} ran`, `prefix cache ${number(deed.prefix[0])}, everything ${number(deed.whole[0])}`]);
    }
    if (lane === null) return show(event, null);
    const span = operation === null ? null : spanAt(lane, operation);
    if (operation === null) return show(event, [nameOf(life.lanes[lane]), life.lanes[lane].chunk_id.slice(0, 16), count(life.lanes[lane].tokens, "token")]);
    return show(event, span ? [nameOf(life.lanes[lane]), ...about(lane, operation, span)] : null);
  });

  function about(lane, operation, span) {
    const mark = life.marksAt[operation].find((each) => each.lane === lane);
    const lines = [`${span.clean ? "shown clean: " : ""}${span.guarantee}: ${GUARANTEES[span.guarantee] || ""}`];
    if (mark) lines.push(did(mark));
    if (span.rank) lines.push(`patch of rank ${span.rank}, ${(100 * span.patch_bytes / span.bytes).toFixed(1)} % of its KV`);
    if (span.departed) lines.push(`${Math.round(100 * span.departed)} % of what stood before it has left`);
    if (span.remembers.length) lines.push(`still knows ${known(span.remembers)}`);
    return lines;
  }
  const did = (mark) => mark.how === "prefilled" ? `${count(mark.tokens, "token")} ran: ${REASONS[mark.reason]}`
    : mark.tokens ? `${HOW[mark.how][1]}, once ${count(mark.tokens, "token")} of its copy had run` : HOW[mark.how][1];

  // -- one operation -------------------------------------------------------------------------------------

  function detail() {
    const deed = life.deeds[chosen], panel = $("detail");
    const bars = html("div");
    rivals(bars, [
      { name: "ran", value: deed.tokens, fill: "accent", ours: true },
      { name: "prefix cache", value: deed.prefix[0], fill: "rival" },
      { name: "everything", value: deed.whole[0], fill: "whole" },
    ]);
    const facts = [
      ["forwards", number(deed.forwards)],
      ["vision encodes", `${number(deed.encodes)} (prefix cache ${number(deed.prefix[1])})`],
      deed.taken ? ["taken over", count(deed.taken, "token")] : null,
      deed.turned ? ["keys turned", bytes(deed.turned)] : null,
      deed.patched ? ["patches applied", bytes(deed.patched)] : null,
      deed.left.length ? ["left", known(deed.left)] : null,
      ["memory", bytes(sum(deed.memory.slice(0, 3)))],
    ].filter(Boolean);
    const made = [
      html("h3", {}, `${chosen + 1}. ${deed.name}`),
      html("p", { class: "sub" }, `${new Date(1000 * deed.time).toLocaleString()} · ${seconds(deed.seconds)}`),
      html("h4", {}, "Tokens"), bars,
      html("dl", {}, ...facts.flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)])),
    ];
    const spent = sum(deed.times);
    if (spent > 0) {
      made.push(html("h4", {}, "Time by part"),
        html("div", { class: "parts" }, ...PARTS.map(([, fill], i) => html("i", { style: `background:${colour(fill)};flex:${deed.times[i] / spent} 0 0` }))),
        html("div", { class: "partnames" }, ...PARTS.map(([name, fill], i) => html("span", {}, html("span", { class: "dot", style: `background:${colour(fill)}` }), `${name} ${seconds(deed.times[i])}`))));
    }
    made.push(html("h4", {}, `The window afterwards: ${count(deed.order.length, "chunk")}`));
    let place = life.anchor;
    deed.order.forEach((lane, i) => {
      const one = life.lanes[lane], span = spanAt(lane, chosen), mark = life.marksAt[chosen].find((each) => each.lane === lane);
      if (i < 100) {
        const source = picture(one);
        const lines = [`from token ${number(place)}`, mark ? did(mark) : "stays as it is"];
        if (span.rank) lines.push(`rank ${span.rank}, ${bytes(span.patch_bytes)}`);
        if (span.share !== null) lines.push(`share ${Math.round(100 * span.share)} %`);
        if (span.remembers.length) lines.push(`still knows ${known(span.remembers)}`);
        made.push(html("div", { class: "chunk" },
          source ? html("img", { src: source, alt: "" }) : html("span", { class: "none" }),
          html("div", {}, html("div", { class: "text" }, nameOf(one)), html("div", { class: "what" }, lines.join(" · "))),
          html("span", { class: "chip" }, html("span", { class: "dot", style: `background:${colour(span.guarantee)}` }), span.clean ? "clean" : span.guarantee)));
      }
      place += one.tokens;
    });
    if (deed.order.length > 100) made.push(html("p", { class: "sub" }, `and ${number(deed.order.length - 100)} more`));
    if (deed.notes.length) made.push(html("h4", {}, "Notes"), html("ul", { class: "notes" }, ...deed.notes.map((note) => html("li", {}, note))));
    panel.replaceChildren(...made);
  }

  // -- the cards below -------------------------------------------------------------------------------------

  function table(names, rows) {
    if (!rows.length) return html("p", { class: "quiet" }, "None.");
    const cell = (tag, value, i) => html(tag, names[i].n ? { class: "n" } : {}, value);
    return html("div", { class: "scroll" }, html("table", {},
      html("thead", {}, html("tr", {}, ...names.map((name, i) => cell("th", name.name, i)))),
      html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((value, i) => cell("td", value, i)))))));
  }

  function reasons() {
    const rows = new Map();
    for (const mark of life.marks) {
      if (mark.how !== "prefilled") continue;
      const row = rows.get(mark.reason) || rows.set(mark.reason, { chunks: 0, tokens: 0 }).get(mark.reason);
      row.chunks++;
      row.tokens += mark.tokens;
    }
    const sorted = [...rows].sort((a, b) => b[1].tokens - a[1].tokens);
    $("reasons").replaceChildren(table([{ name: "reason" }, { name: "chunks", n: 1 }, { name: "tokens run", n: 1 }],
      sorted.map(([reason, row]) => [REASONS[reason], number(row.chunks), number(row.tokens)])));
  }

  function memory() {
    const drawing = $("memory"), w = drawing.clientWidth || 380, h = drawing.clientHeight || 150, deeds = life.deeds;
    const most = Math.max(1, ...thin(deeds.map((d) => sum(d.memory)), 400).map(([, n]) => n));
    const x = (i) => (deeds.length > 1 ? i / (deeds.length - 1) : 1) * w, y = (n) => h - 4 - (n / most) * (h - 24);
    drawing.setAttribute("viewBox", `0 0 ${w} ${h}`);
    drawing.replaceChildren();
    const kept = thin(deeds.map((d) => d.memory), 400);
    if (kept.length === 1) kept.unshift([kept[0][0] - 1, kept[0][1]]);
    TIERS.forEach(([, fill], tier) => {
      const up = (row) => sum(row.slice(0, tier + 1)), low = (row) => sum(row.slice(0, tier));
      const points = [...kept.map(([i, row]) => `${Math.max(0, x(i)).toFixed(1)},${y(up(row)).toFixed(1)}`),
        ...[...kept].reverse().map(([i, row]) => `${Math.max(0, x(i)).toFixed(1)},${y(low(row)).toFixed(1)}`)].join(" ");
      drawing.append(svg("polygon", { points, fill: colour(fill), "fill-opacity": .85 }));
    });
    drawing.append(svg("text", { x: 0, y: 12, class: "small quiet" }, `at most ${bytes(most)}`));
    const last = deeds[deeds.length - 1].memory;
    $("tiers").replaceChildren(table([{ name: "" }, { name: "at the end", n: 1 }], TIERS.map(([name, fill], i) => [
      html("span", {}, html("span", { class: "dot", style: `background:${colour(fill)}` }), name), bytes(last[i])])));
  }

  function patches() {
    const rows = [], met = new Set();
    for (const span of life.spans) {
      if (!span.rank) continue;
      const key = [span.lane, span.rank, span.patch_bytes].join();
      if (met.has(key)) continue;
      met.add(key);
      const lane = life.lanes[span.lane], id = short(lane.chunk_id);
      rows.push([nameOf(lane) === id ? id : `${nameOf(lane)} ${id}`, `rank ${span.rank}`, bytes(span.patch_bytes),
        `${(100 * span.patch_bytes / span.bytes).toFixed(1)} %`, span.error === null ? "–" : span.error.toFixed(3)]);
      if (rows.length === 200) break;
    }
    $("patches").replaceChildren(table([{ name: "chunk" }, { name: "kind" }, { name: "bytes", n: 1 }, { name: "share of the KV", n: 1 }, { name: "error", n: 1 }], rows));
  }

  function everything() {
    const picker = $("life");
    $("choice").hidden = lives.length < 2;
    picker.replaceChildren(...lives.map((each, i) => html("option", { value: i }, `${each.name} (${number(each.deeds.length)})`)));
    picker.value = lives.indexOf(life);
    chosen = Math.max(0, Math.min(chosen, life.deeds.length - 1));
    const sight = grid.clientWidth - (grid.clientWidth < 560 ? 96 : 232);
    if (!zoomed) width = Math.max(64, Math.min(104, Math.floor(sight / life.deeds.length)));
    headline(); growth(); legend(); detail(); draw(); reasons(); memory(); patches();
  }
  function busiest() {
    // the operation that saved most is the one to look at first
    let best = 0, saved = -1;
    life.deeds.forEach((d, i) => { if (d.prefix[0] - d.tokens > saved) { saved = d.prefix[0] - d.tokens; best = i; } });
    return best;
  }

  $("life").addEventListener("change", (event) => {
    life = lives[+event.target.value];
    chosen = 0;
    grid.scrollLeft = 0;
    everything();
  });
  let resized = 0;
  addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => life && everything(), 60); });

  const doc = JSON.parse($("data").textContent);
  read(doc);
  if (life) { chosen = doc.live ? life.deeds.length - 1 : busiest(); everything(); choose(chosen); }
  else $("when").textContent = "nothing has happened yet";
  if (doc.live) {
    new EventSource("events").onmessage = (event) => {
      read(JSON.parse(event.data));
      if (!life) return;
      if (following) chosen = life.deeds.length - 1;
      everything();
      if (following) choose(chosen);
    };
  }
})();
