// Draws the charts of a page made by html.py. Times are microseconds, lengths CSS pixels.
// The upper half computes and touches no document; the lower half draws and listens.
"use strict";

// Of a pair, a bar is its F, and BESIDE has the first four entries of its B; else a bar ends with CRITICAL.
const [TYPE, STAGE, CHUNK, MICROBATCH, START, LENGTH, WAITED, CRITICAL, BESIDE] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
const LEFT = 62, RIGHT = 12, LANE = 5, GAP = 4, AXIS = 22, MEMORY = 110;
const LANES = [["collectives", "#b5651d"]];

// The index of the first bar that ends after a time; bars are in order and do not overlap.
function firstAfter(bars, time) {
  let low = 0, high = bars.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (bars[middle][START] + bars[middle][LENGTH] <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

function barAt(bars, time, slack) {
  const k = firstAfter(bars, time);
  for (const bar of [bars[k], bars[k - 1]]) {
    if (bar && bar[START] - slack <= time && time <= bar[START] + bar[LENGTH] + slack) return bar;
  }
  return null;
}

// The smallest of 1, 2, 5, 10, ... times a power of ten that is not below a number.
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((k) => k * power).find((step) => step >= least * (1 - 1e-9));
}

// Zoom a view {from, to} by a factor around a time, within [0, length].
function zoomed(view, factor, around, length) {
  const span = Math.min(Math.max((view.to - view.from) * factor, Math.min(10, length)), length);
  const share = (around - view.from) / (view.to - view.from);
  return moved({ from: around - share * span, to: around + (1 - share) * span }, 0, length);
}

function moved(view, by, length) {
  const span = view.to - view.from;
  const from = Math.min(Math.max(view.from + by, 0), Math.max(length - span, 0));
  return { from, to: from + span };
}

function rowHeight(rows) {
  return rows <= 8 ? 26 : rows <= 16 ? 21 : rows <= 32 ? 16 : 11;
}

// The amount that a row holds at a time; its memory is a list of [time, amount from then on].
function amountAt(memory, time) {
  let low = 0, high = memory.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (memory[middle][0] <= time) low = middle + 1;
    else high = middle;
  }
  return low ? memory[low - 1][1] : 0;
}

function milliseconds(time) {
  return (time / 1000).toFixed(time < 1e5 ? 3 : 2) + " ms";
}

function number(value) {
  return value >= 1000 ? Math.round(value).toLocaleString("en") : String(Math.round(value * 100) / 100);
}

// The passes of a bar: two of a pair, the first above the second.
function partsOf(bar) {
  return bar[BESIDE] ? [bar, bar[BESIDE]] : [bar];
}

// What a pass or a collective is, and where it runs.
function meaning(data, bar) {
  const passes = data.types.length;
  const type = bar[TYPE] < passes ? data.types[bar[TYPE]] : data.comms[bar[TYPE] - passes];
  const dot = /\d$/.test(type.name) ? "." : "";
  const several = data.types[0].fills.length > 1 && ["F", "B", "W"].includes(type.name);
  const place = ["F", "B", "W"].includes(type.name) ? `stage ${bar[STAGE]}` : `pipeline rank ${bar[STAGE]}`;
  return [
    `${bar[STAGE]}${type.name}${dot}${bar[MICROBATCH]}: ${type.meaning}`,
    `${place}${several ? `, chunk ${bar[CHUNK]}` : ""}, microbatch ${bar[MICROBATCH]}`,
  ];
}

// What the tip says about a bar of a row.
function description(data, chart, row, bar) {
  const pass = bar[TYPE] < data.types.length, parts = partsOf(bar).map((part) => meaning(data, part));
  const lines = [
    ...parts.flat(),
    ...(parts.length > 1 ? ["both together"] : []),
    `from ${milliseconds(bar[START])} for ${milliseconds(bar[LENGTH])}`,
  ];
  if (pass) {
    const k = row.passes.indexOf(bar), before = row.passes[k - 1];
    const idle = bar[START] - (before ? before[START] + before[LENGTH] : 0);
    const name = /^\d+(.*?)\.?\d+$/.exec(bar[WAITED]);
    const comm = name && data.comms.find((c) => c.name === name[1]);
    if (bar[WAITED]) {
      lines.push(`waited ${milliseconds(idle)} for ${bar[WAITED]}${comm ? `: ${comm.meaning}` : ""}`);
    } else if (idle > 0) {
      lines.push(`idle before it: ${milliseconds(idle)}`);
    }
    if (row.memory.length) {
      const amount = number(amountAt(row.memory, bar[START]));
      lines.push(`the rank holds ${amount} ${amount === "1" ? chart.unit.replace("hes", "h") : chart.unit}`);
    }
    if (bar[CRITICAL]) lines.push("on the critical path");
  }
  return lines.join("\n");
}

function start(data) {
  const length = Math.max(...data.charts.map((chart) => chart.length), 1);
  const state = { view: { from: 0, to: length }, hover: null, microbatch: null, kept: null, line: null };
  const shown = (name) => document.getElementById(name).checked;
  const tip = document.getElementById("tip"), release = document.getElementById("release");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const panels = data.charts.map((chart) => new Panel(chart));

  function Panel(chart) {
    const heading = document.createElement("h2");
    heading.textContent = chart.title;
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", chart.title);
    this.chart = chart;
    document.getElementById("charts").append(heading, this.canvas);
    listen(this);
  }

  const lanesOf = (chart) =>
    shown("comms") ? LANES.filter(([lane]) => chart.rows.some((row) => row[lane].length)) : [];
  const pitch = (chart) => rowHeight(chart.rows.length) + lanesOf(chart).length * LANE + GAP;
  const hasMemory = (chart) => shown("memory") && chart.rows.some((row) => row.memory.length);

  // Pixels for one microsecond, and the time under a pixel, in the present view.
  const scaleOf = (canvas) =>
    ((canvas.clientWidth || 960) - LEFT - RIGHT) / (state.view.to - state.view.from);
  const timeAt = (canvas, pixel) => state.view.from + (pixel - LEFT) / scaleOf(canvas);

  function draw(panel) {
    const { canvas, chart } = panel;
    const width = canvas.clientWidth || 960, rows = chart.rows.length;
    const height = rows * pitch(chart) + AXIS + (hasMemory(chart) ? MEMORY + AXIS : 0);
    const sharp = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * sharp);
    canvas.height = Math.round(height * sharp);
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(sharp, sharp);
    const scale = scaleOf(canvas), x = (time) => LEFT + (time - state.view.from) * scale;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    chart.rows.forEach((row, k) => drawRow(pen, chart, row, k * pitch(chart), x, width));
    axis(pen, rows * pitch(chart), x, width);
    if (hasMemory(chart)) drawMemory(pen, chart, rows * pitch(chart) + AXIS, x, width);
    if (state.line !== null) {
      pen.fillStyle = colour("quiet");
      pen.fillRect(x(state.line) - 0.5, 0, 1, height);
    }
  }

  function drawRow(pen, chart, row, y, x, width) {
    const tall = rowHeight(chart.rows.length), { from, to } = state.view;
    pen.fillStyle = colour("ground");
    pen.fillRect(LEFT, y, Math.max(Math.min(x(chart.length), width - RIGHT) - LEFT, 0), tall);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, y, width - LEFT - RIGHT, pitch(chart));
    pen.clip();
    const microbatch = state.kept ?? state.microbatch;
    pen.textAlign = "center";
    for (let k = firstAfter(row.passes, from); k < row.passes.length && row.passes[k][START] < to; k++) {
      const bar = row.passes[k], parts = partsOf(bar), high = tall / parts.length;
      const left = x(bar[START]), wide = Math.max(bar[LENGTH] * (x(1) - x(0)), 0.6);
      parts.forEach((part, half) => {
        const faded = (microbatch !== null && part[MICROBATCH] !== microbatch) || (shown("critical") && !bar[CRITICAL]);
        pen.globalAlpha = faded ? 0.3 : 1;
        drawPass(pen, part, { left, wide, top: y + half * high, high }, width);
      });
    }
    pen.globalAlpha = 1;
    pen.font = "11px system-ui, sans-serif";
    lanesOf(chart).forEach(([lane, colour], place) => {
      for (let k = firstAfter(row[lane], from); k < row[lane].length && row[lane][k][START] < to; k++) {
        const bar = row[lane][k];
        pen.globalAlpha = microbatch !== null && bar[MICROBATCH] !== microbatch ? 0.25 : 1;
        pen.fillStyle = colour;
        pen.fillRect(x(bar[START]), y + tall + 1 + place * LANE, Math.max(bar[LENGTH] * (x(1) - x(0)), 0.6), LANE - 1);
      }
    });
    pen.restore();
    pen.fillStyle = colour("ink");
    pen.textAlign = "right";
    pen.fillText(row.label, LEFT - 8, y + tall / 2);
  }

  function drawPass(pen, pass, { left, wide, top, high }, width) {
    const type = data.types[pass[TYPE]], label = String(pass[MICROBATCH]);
    pen.fillStyle = type.fills[pass[CHUNK]];
    pen.fillRect(left, top, wide, high);
    if (wide > 2.5) {
      pen.strokeStyle = "#444";
      pen.lineWidth = 0.5;
      pen.strokeRect(left, top + 0.25, wide, high - 0.5);
    }
    const inside = visibleMiddle(left, wide, width);
    if (inside && label.length * 6.6 + 1.5 <= inside.wide) {
      pen.font = `${Math.min(11, high - 1)}px system-ui, sans-serif`;
      pen.fillStyle = type.ink;
      pen.fillText(wide > 110 ? `${type.name}${/\d$/.test(type.name) ? "." : ""}${label}` : label, inside.middle, top + high / 2 + 0.5);
    }
  }

  function visibleMiddle(left, wide, width) {
    const a = Math.max(left, LEFT), b = Math.min(left + wide, width - RIGHT);
    return b > a ? { middle: (a + b) / 2, wide: b - a } : null;
  }

  function axis(pen, y, x, width) {
    const step = roundStep(90 / (x(1) - x(0)));
    pen.fillStyle = colour("quiet");
    pen.textAlign = "center";
    for (let time = Math.ceil(state.view.from / step) * step; x(time) <= width - RIGHT + 1; time += step) {
      pen.fillRect(x(time) - 0.5, y, 1, 4);
      pen.fillText(`${Number((time / 1000).toPrecision(12))}${time === 0 ? " ms" : ""}`, x(time), y + 12);
    }
  }

  // The colour of a rank's line: from blue (first) to red (last).
  function rankColour(rank, ranks, chosen) {
    const hue = 220 - (220 * rank) / Math.max(ranks - 1, 1);
    const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
    return `hsl(${hue} 70% ${dark ? (chosen ? 75 : 58) : chosen ? 25 : 42}%)`;
  }

  // The key: the numbers of the ranks in their colours, as many as there is room for.
  function memoryKey(pen, chart, top, width) {
    const ranks = chart.rows.length, step = Math.max(1, Math.ceil((ranks * 20) / Math.max(width - LEFT - RIGHT - 250, 60)));
    pen.textAlign = "right";
    for (let rank = ranks - 1 - ((ranks - 1) % step), at = width - RIGHT - 2; rank >= 0; rank -= step, at -= 20) {
      pen.fillStyle = rankColour(rank, ranks, false);
      pen.fillText(rank === 0 ? "rank 0" : String(rank), at, top + 4);
    }
  }

  function drawMemory(pen, chart, top, x, width) {
    const most = Math.max(...chart.rows.map((row) => row.memory.reduce((m, point) => Math.max(m, point[1]), 0)), 1e-9);
    const y = (value) => top + MEMORY - (value / most) * (MEMORY - 16);
    pen.fillStyle = colour("quiet");
    pen.textAlign = "right";
    const step = roundStep(most / 3.5);
    for (let value = 0; value <= most; value += step) {
      pen.fillRect(LEFT, y(value), width - LEFT - RIGHT, 0.4);
      pen.fillText(number(value), LEFT - 6, y(value));
    }
    pen.textAlign = "left";
    pen.fillText(`held by each rank, ${chart.unit}`, LEFT + 4, top + 4);
    memoryKey(pen, chart, top, width);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, top, width - LEFT - RIGHT, MEMORY + 1);
    pen.clip();
    chart.rows.forEach((row, rank) => {
      const chosen = state.row === rank && state.chart === chart;
      pen.strokeStyle = rankColour(rank, chart.rows.length, chosen);
      pen.lineWidth = chosen ? 2.5 : 1;
      pen.beginPath();
      let level = y(amountAt(row.memory, state.view.from));
      pen.moveTo(LEFT, level);
      for (const [time, value] of row.memory) {
        if (time < state.view.from) continue;
        pen.lineTo(x(time), level);
        if (time > state.view.to) break;
        level = y(value);
        pen.lineTo(x(time), level);
      }
      pen.stroke();
    });
    pen.restore();
    axis(pen, top + MEMORY, x, width);
  }

  const drawAll = () => panels.forEach(draw);
  let asked = false;
  function redraw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; drawAll(); });
  }

  function listen(panel) {
    const { canvas } = panel, fingers = new Map();
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        state.view = moved(state.view, event.deltaX / scaleOf(canvas), length);
      } else {
        state.view = zoomed(state.view, Math.exp(event.deltaY * 0.0015), timeAt(canvas, event.offsetX), length);
      }
      point(panel, event);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, event.offsetX);
      drag = { at: event.offsetX, moved: fingers.size > 1 };
      canvas.setPointerCapture(event.pointerId);
      point(panel, event);
    });
    const lifted = (event) => {
      fingers.delete(event.pointerId);
      if (event.type === "pointerup" && drag && !drag.moved) {
        const hit = state.microbatch;
        keep(hit === state.kept ? null : hit);
      }
      drag = null;
      redraw();
    };
    canvas.addEventListener("pointerup", lifted);
    canvas.addEventListener("pointercancel", lifted);
    canvas.addEventListener("pointermove", (event) => {
      if (fingers.size === 2 && fingers.has(event.pointerId)) {
        const [other] = [...fingers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
        const before = Math.max(Math.abs(fingers.get(event.pointerId) - other), 8);
        const factor = before / Math.max(Math.abs(event.offsetX - other), 8);
        fingers.set(event.pointerId, event.offsetX);
        state.view = zoomed(state.view, factor, timeAt(canvas, (event.offsetX + other) / 2), length);
        redraw();
        return;
      }
      if (drag) {
        drag.moved = drag.moved || Math.abs(event.offsetX - drag.at) > 3;
        if (!drag.moved) return;
        state.view = moved(state.view, (drag.at - event.offsetX) / scaleOf(canvas), length);
        drag.at = event.offsetX;
        tip.style.display = "none";
        redraw();
        return;
      }
      point(panel, event);
    });
    canvas.addEventListener("pointerleave", forget);
    canvas.addEventListener("dblclick", whole);
  }

  // On the whole page, so that keys work before anything is clicked.
  function pressed(event) {
    const span = state.view.to - state.view.from, middle = state.view.from + span / 2;
    const change = {
      ArrowLeft: () => moved(state.view, -span / 5, length),
      ArrowRight: () => moved(state.view, span / 5, length),
      "+": () => zoomed(state.view, 0.7, middle, length),
      "-": () => zoomed(state.view, 1 / 0.7, middle, length),
      0: () => ({ from: 0, to: length }),
      Escape: () => (keep(null), state.view),
    }[event.key];
    if (!change || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    state.view = change();
    forget();
  }

  // What was under the pointer is elsewhere after the view has changed.
  function forget() {
    state.hover = state.microbatch = state.line = state.row = null;
    tip.style.display = "none";
    redraw();
  }

  function point(panel, event) {
    const { canvas, chart } = panel, time = timeAt(canvas, event.offsetX);
    const k = Math.floor(event.offsetY / pitch(chart)), row = chart.rows[k];
    const inRow = event.offsetY - k * pitch(chart), tall = rowHeight(chart.rows.length);
    const lane = lanesOf(chart)[Math.floor((inRow - tall - 1) / LANE)];
    const bars = row && (inRow <= tall ? row.passes : lane ? row[lane[0]] : []);
    state.line = event.offsetX >= LEFT ? time : null;
    state.row = row ? k : null;
    state.chart = chart;
    state.hover = bars ? barAt(bars, time, 2 / scaleOf(canvas)) : null;
    const parts = state.hover ? partsOf(state.hover) : [];
    state.microbatch = parts.length ? parts[inRow > tall / 2 ? parts.length - 1 : 0][MICROBATCH] : null;
    tip.style.display = state.hover ? "block" : "none";
    if (state.hover) {
      tip.textContent = description(data, chart, row, state.hover);
      const right = event.clientX + 16 + tip.offsetWidth > window.innerWidth;
      tip.style.left = `${right ? event.clientX - 12 - tip.offsetWidth : event.clientX + 16}px`;
      tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 4)}px`;
    }
    redraw();
  }

  function keep(microbatch) {
    state.kept = microbatch;
    release.hidden = microbatch === null;
    release.textContent = `let go of microbatch ${microbatch}`;
    redraw();
  }

  function whole() {
    state.view = { from: 0, to: length };
    forget();
  }

  function legend() {
    const box = document.getElementById("legend");
    for (const type of data.types.filter((type) => type.shown)) {
      const entry = document.createElement("span");
      const several = ["F", "B", "W"].includes(type.name);
      for (const fill of several ? type.fills : type.fills.slice(0, 1)) {
        const swatch = document.createElement("i");
        swatch.style.background = fill;
        entry.append(swatch);
      }
      const shades = several && type.fills.length > 1 ? ` (chunks 0–${type.fills.length - 1} of a rank)` : "";
      entry.append(` ${type.name}: ${type.meaning}${shades}`);
      box.append(entry);
    }
    for (const [lane, colour] of LANES) {
      if (!data.charts.some((chart) => chart.rows.some((row) => row[lane].length))) continue;
      const entry = document.createElement("span"), swatch = document.createElement("i");
      swatch.style.cssText = `background: ${colour}; height: 4px; vertical-align: 3px; border: 0`;
      entry.append(swatch, " a collective of the vocabulary layers, from its launch to its end");
      box.append(entry);
    }
  }

  for (const name of ["comms", "memory", "critical"]) document.getElementById(name).addEventListener("change", redraw);
  document.getElementById("critical").parentElement.hidden =
    !data.charts.some((chart) => chart.rows.some((row) => row.passes.some((bar) => bar[CRITICAL])));
  document.getElementById("reset").addEventListener("click", whole);
  release.addEventListener("click", () => keep(null));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  window.addEventListener("resize", redraw);
  window.addEventListener("scroll", forget);
  document.addEventListener("keydown", pressed);
  legend();
  drawAll();
}

if (typeof module !== "undefined") {
  module.exports = { firstAfter, barAt, partsOf, roundStep, zoomed, moved, amountAt, description };
} else {
  start(JSON.parse(document.getElementById("data").textContent));
}
