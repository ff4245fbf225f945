"use strict";
/* Regions drawn on the shown image, with mouse, pen or finger: rectangles, brush, eraser. */

const TOOLS = { r: "rectangle", p: "brush", e: "eraser" };
const PAUSE = 800, SHARP = 1280, MOST_POINTS = 4000, MOST_SHAPES = 200, MOST_RADIUS = 200;
const pen = { tool: null, share: 0.02, stroke: null, timer: 0 };

function canvas() {
  return document.querySelector("canvas.drawing");
}

function radius(image) {
  return Math.max(1, Math.min(MOST_RADIUS, Math.round(pen.share * Math.max(image.width, image.height))));
}

function paint() {
  const sheet = canvas(), context = sheet.getContext("2d");
  const scale = SHARP / Math.max(shown.width, shown.height);
  sheet.width = Math.round(shown.width * scale);
  sheet.height = Math.round(shown.height * scale);
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.lineCap = context.lineJoin = "round";
  context.fillStyle = context.strokeStyle = "#ff00c8";
  for (const shape of [...shown.drawing.shapes, ...(pen.stroke ? [pen.stroke] : [])]) {
    context.globalCompositeOperation = shape.erase ? "destination-out" : "source-over";
    const [[x, y], ...others] = shape.points;
    if (shape.kind === "rectangle") {
      const [[right, bottom]] = others.slice(-1);
      context.fillRect(x, y, right - x, bottom - y);
      continue;
    }
    context.lineWidth = 2 * shape.radius;
    context.beginPath();
    context.moveTo(x, y);
    for (const point of [[x, y], ...others]) context.lineTo(...point);
    context.stroke();
  }
}

function sized() {
  return pen.tool === "brush" || pen.tool === "eraser";
}

/* The tool stays from one image to the next; null puts it away. */
function useTool(name) {
  pen.tool = name;
  pen.stroke = null;
  figure.classList.toggle("drawn-on", Boolean(name));
  document.querySelectorAll("[data-tool]").forEach((button) =>
    button.setAttribute("aria-pressed", button.dataset.tool === name));
  document.querySelectorAll(".tools .size").forEach((button) => { button.hidden = !sized(); });
  if (!name) saveDrawing();
}

function tellDrawing(text) {
  const place = document.getElementById("drawn");
  if (place) place.textContent = text;
}

/* --- saving: a moment after the last stroke, and before anything else happens to the image --- */

function changed() {
  shown.drawing.dirty = true;
  tellDrawing("drawing not saved yet");
  clearTimeout(pen.timer);
  pen.timer = setTimeout(saveDrawing, PAUSE);
  paint();
}

function saveDrawing() {
  clearTimeout(pen.timer);
  const image = shown;
  if (image && image.drawing.dirty) inOrder(() => sendDrawing(image));
}

/* Another image comes. */
function leaveDrawing() {
  saveDrawing();
  pen.stroke = null;
  tellDrawing("");
}

async function sendDrawing(image, options = {}) {
  const { version, shapes } = image.drawing;
  const place = `/api/v1/images/${image.id}/drawing`;
  image.drawing.dirty = false;
  try {
    image.drawing.version = (await ask(place, { version, shapes }, options)).version;
    if (!image.drawing.dirty) tellDrawing("drawing saved ✓");
  } catch (error) {
    if (error.status !== 409) image.drawing.dirty = true;
    else image.drawing = await fetch(place).then((answer) => answer.ok ? answer.json() : image.drawing).catch(() => image.drawing); // somebody else's
    if (image === shown) paint();
    tellDrawing("");
    showProblem(`Image ${image.id}: the drawing is not saved. ${error.status ? error.message : "The station does not answer; draw on to try again."}`);
  }
}

window.addEventListener("pagehide", () => {
  if (shown && shown.drawing.dirty) sendDrawing(shown, { keepalive: true });
});

/* --- keys and pointer --- */

function drawingKey(key) {
  if (!shown || !figure.dataset.draw || figure.hidden) return false;
  if (TOOLS[key]) useTool(pen.tool === TOOLS[key] ? null : TOOLS[key]);
  else if (!pen.tool) return false;
  else if (key === "Escape") useTool(null);
  else if (key === "[" && sized()) pen.share = Math.max(0.001, pen.share / 1.25);
  else if (key === "]" && sized()) pen.share = Math.min(0.2, pen.share * 1.25);
  else if (key === "z") {
    if (shown.drawing.mine) { // not what others have drawn: the eraser is for that
      shown.drawing.mine -= 1;
      shown.drawing.shapes.pop();
      changed();
    }
  } else return false;
  return true;
}

function place(event) {
  const box = canvas().getBoundingClientRect();
  const along = (at, from, length, most) => Math.max(0, Math.min(most, Math.round(((at - from) / length) * most)));
  return [along(event.clientX, box.left, box.width, shown.width), along(event.clientY, box.top, box.height, shown.height)];
}

function begin(event) {
  if (!pen.tool || event.button || !event.isPrimary) return;
  event.preventDefault();
  canvas().setPointerCapture(event.pointerId);
  const start = place(event), brush = pen.tool !== "rectangle";
  pen.stroke = {
    kind: brush ? "brush" : "rectangle", erase: pen.tool === "eraser",
    radius: brush ? radius(shown) : 0, points: brush ? [start] : [start, start],
  };
  paint();
}

function go(event) {
  if (!pen.stroke || !event.isPrimary) return;
  const at = place(event), { kind, points } = pen.stroke;
  if (kind === "rectangle") points[1] = at;
  else {
    const [x, y] = points[points.length - 1];
    if (Math.hypot(at[0] - x, at[1] - y) < Math.max(1, pen.stroke.radius / 4)) return;
    points.push(at);
  }
  paint();
}

function end(event) {
  if (!pen.stroke || !event.isPrimary) return;
  const stroke = pen.stroke, { shapes } = shown.drawing;
  pen.stroke = null;
  const [[x, y], [right, bottom]] = stroke.kind === "rectangle" ? stroke.points : [[0, 0], [1, 1]];
  const points = [...shapes, stroke].reduce((sum, shape) => sum + shape.points.length, 0);
  if (points > MOST_POINTS || shapes.length >= MOST_SHAPES) {
    showProblem("This is more than one drawing can hold: use rectangles, or a larger brush.");
  } else if (event.type === "pointerup" && x !== right && y !== bottom) {
    shapes.push(stroke);
    shown.drawing.mine = (shown.drawing.mine || 0) + 1;
    changed();
    return;
  }
  paint();
}

if (canvas()) {
  canvas().addEventListener("pointerdown", begin);
  canvas().addEventListener("pointermove", go);
  canvas().addEventListener("pointerup", end);
  canvas().addEventListener("pointercancel", end);
}
