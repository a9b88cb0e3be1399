"use strict";
// Three things to play with: the Rosenbrock function's linearization, Monte Carlo samples, and structures of a matrix.
// Plain JavaScript, no network. Each widget is a <div class="play" data-widget="..."> with its data in JSON beside it.

(function () {
  const BLUE = [33, 102, 172], RED = [178, 24, 43];

  function element(tag, attributes, parent, text) {
    const made = document.createElement(tag);
    for (const name in attributes) made.setAttribute(name, attributes[name]);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.appendChild(made);
    return made;
  }

  function canvas(parent, width, height, label) {
    const made = element("canvas", { width: 2 * width, height: 2 * height, role: "img", "aria-label": label, tabindex: 0 }, parent);
    made.style.width = width + "px";
    made.style.height = "auto";
    made.style.aspectRatio = width + " / " + height;
    return made;
  }

  // A canvas with axes: ticks are [place between 0 and 1, text], from the left and from the top.
  function framed(parent, size, label, ticks, names) {
    const frame = element("div", { class: "frame" }, parent);
    const left = element("div", { class: "ticks left", "aria-hidden": "true" }, frame);
    const made = canvas(frame, size, size, label);
    element("div", {}, frame);
    const below = element("div", { class: "ticks below", "aria-hidden": "true" }, frame);
    for (const [at, text] of ticks.left) element("span", { style: "top:" + 100 * at + "%" }, left, text);
    for (const [at, text] of ticks.below) element("span", { style: "left:" + 100 * at + "%" }, below, text);
    if (names) {
      element("span", { class: "axis" }, left, names[1]);
      element("span", { class: "axis" }, below, names[0]);
    }
    return made;
  }

  function legend(parent, entries) {
    const list = element("ul", { class: "legend" }, parent);
    for (const [sign, color, text] of entries) {
      const item = element("li", {}, list);
      element("span", { style: "color:" + color, "aria-hidden": "true" }, item, sign + " ");
      item.append(text);
    }
  }

  // The middle of each block is its tick, on both axes.
  function blockTicks(blocks) {
    const size = blocks[blocks.length - 1][2];
    const ticks = blocks.map(([name, start, stop]) => [(start + stop) / 2 / size, name]);
    return { left: ticks, below: ticks };
  }

  function scale(parent, limit) {
    const made = element("div", { class: "scale" }, parent);
    const stops = Array.from({ length: 21 }, (_, i) => "rgb(" + colour((i - 10) / 10, 1).join(",") + ")");
    element("span", {}, made, number(-limit));
    const bar = element("span", { class: "bar", role: "img", "aria-label": "Colors from blue, negative, over white, zero, to red, positive" }, made);
    bar.style.background = "linear-gradient(to right, " + stops.join(", ") + ")";
    element("span", {}, made, number(limit));
  }

  function position(event, on) {
    const box = on.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  function number(value) {
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e4) ? value.toExponential(2) : value.toPrecision(3);
  }

  // Blue for negative, red for positive, white for zero; the root makes small entries visible.
  function colour(value, limit) {
    const t = Math.sqrt(Math.min(Math.abs(value) / limit, 1));
    const end = value < 0 ? BLUE : RED;
    return end.map((c) => Math.round(255 + (c - 255) * t));
  }

  function heatmap(on, matrix, blocks, limit) {
    const context = on.getContext("2d"), size = matrix.length;
    const pixels = new ImageData(size, size);
    for (let i = 0; i < size; i++)
      for (let j = 0; j < size; j++) pixels.data.set([...colour(matrix[i][j], limit), 255], 4 * (i * size + j));
    const small = element("canvas", { width: size, height: size });
    small.getContext("2d").putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, on.width, on.height);
    context.drawImage(small, 0, 0, on.width, on.height);
    context.strokeStyle = "rgba(0, 0, 0, 0.25)";
    context.lineWidth = 1;
    for (const [, , stop] of blocks.slice(0, -1)) {
      const at = Math.round((stop / size) * on.width) + 0.5;
      context.beginPath();
      context.moveTo(at, 0); context.lineTo(at, on.height);
      context.moveTo(0, at); context.lineTo(on.width, at);
      context.stroke();
    }
  }

  function entryName(index, blocks) {
    for (const [name, start, stop] of blocks) if (index < stop) return name + "[" + (index - start) + "]";
    return "";
  }

  function hover(on, out, current) {
    on.addEventListener("pointermove", (event) => {
      const { matrix, blocks } = current(), size = matrix.length;
      const [x, y] = position(event, on);
      const j = Math.min(size - 1, Math.max(0, Math.floor(x * size)));
      const i = Math.min(size - 1, Math.max(0, Math.floor(y * size)));
      out.textContent = entryName(i, blocks) + ", " + entryName(j, blocks) + ": " + number(matrix[i][j]);
    });
    on.addEventListener("pointerleave", () => { out.textContent = "Point at an entry."; });
  }

  // Lines of equal height of a function on a grid, by marching squares.
  function contours(context, values, columns, rows, level, toX, toY) {
    context.beginPath();
    for (let i = 0; i < rows - 1; i++)
      for (let j = 0; j < columns - 1; j++) {
        const corners = [[i, j], [i, j + 1], [i + 1, j + 1], [i + 1, j]];
        const crossings = [];
        for (let k = 0; k < 4; k++) {
          const [a, b] = [corners[k], corners[(k + 1) % 4]];
          const [u, v] = [values[a[0]][a[1]] - level, values[b[0]][b[1]] - level];
          if (u < 0 !== v < 0) {
            const t = u / (u - v);
            crossings.push([toX(a[1] + t * (b[1] - a[1])), toY(a[0] + t * (b[0] - a[0]))]);
          }
        }
        for (let k = 0; k + 1 < crossings.length; k += 2) {
          context.moveTo(...crossings[k]);
          context.lineTo(...crossings[k + 1]);
        }
      }
    context.stroke();
  }

  function rosenbrock(root, data) {
    const alpha = data.alpha, low = [-2, -1], high = [2, 3], cells = 90;
    const ticks = {
      left: [0, 1, 2, 3, 4].map((i) => [i / 4, String(high[1] - i)]),
      below: [0, 1, 2, 3, 4].map((i) => [i / 4, String(low[0] + i)]),
    };
    const picture = framed(root, 420, "Contours of the Rosenbrock function; drag the anchor, or move it with the arrow keys", ticks, ["x\u2081", "x\u2082"]);
    legend(root, [
      ["\u2014", "#777", "Rosenbrock function"], ["\u2605", "#333", "its minimum, (1, 1)"],
      ["\u2014", "#b2182b", "linearized at the anchor"], ["\u2715", "#b2182b", "minimum of that"], ["\u25cf", "#b2182b", "anchor"],
    ]);
    picture.style.touchAction = "none";
    const side = element("div", { class: "numbers", "aria-live": "polite" }, root);
    const anchor = data.anchor.slice();
    const f = (x, y) => (1 - x) ** 2 + alpha * (y - x * x) ** 2;
    // The inner function is replaced by its tangent at the anchor.
    const quadratic = (x, y) => (1 - x) ** 2 + alpha * (y - anchor[0] ** 2 - 2 * anchor[0] * (x - anchor[0])) ** 2;
    const grid = (g) => Array.from({ length: cells }, (_, i) => Array.from({ length: cells }, (_, j) =>
      g(low[0] + (j / (cells - 1)) * (high[0] - low[0]), high[1] - (i / (cells - 1)) * (high[1] - low[1]))));
    const fixed = grid(f);
    const levels = [0.3, 1, 3, 10, 30, 100];

    function draw() {
      const context = picture.getContext("2d"), { width, height } = picture;
      const toX = (j) => (j / (cells - 1)) * width, toY = (i) => (i / (cells - 1)) * height;
      context.clearRect(0, 0, width, height);
      context.lineWidth = 2;
      context.strokeStyle = "rgba(120, 120, 120, 0.7)";
      for (const level of levels) contours(context, fixed, cells, cells, level, toX, toY);
      context.strokeStyle = "rgba(178, 24, 43, 0.8)";
      const moving = grid(quadratic);
      for (const level of levels) contours(context, moving, cells, cells, level, toX, toY);
      const place = (u, v) => [((u - low[0]) / (high[0] - low[0])) * width, ((high[1] - v) / (high[1] - low[1])) * height];
      const [x, y] = anchor;
      context.fillStyle = "#b2182b";
      context.beginPath();
      context.arc(...place(x, y), 12, 0, 7);
      context.fill();
      // Both are zero where x1 = 1, and x2 is on the parabola or on its tangent.
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.font = "36px sans-serif";
      context.fillText("\u2715", ...place(1, 2 * x - x * x));
      context.fillStyle = "#333";
      context.fillText("\u2605", ...place(1, 1));
      const G = [2 * (1 + 4 * alpha * x * x), -4 * alpha * x, 2 * alpha];
      const H = [2 * (1 + 6 * alpha * x * x - 2 * alpha * y), -4 * alpha * x, 2 * alpha];
      side.textContent = "";
      element("p", {}, side, "anchor (" + x.toFixed(2) + ", " + y.toFixed(2) + "), minimum of the linearized function (1, " + (2 * x - x * x).toFixed(2) + ")");
      for (const [name, M] of [["GGN", G], ["Hessian", H]]) {
        const lowest = (M[0] + M[2]) / 2 - Math.sqrt(((M[0] - M[2]) / 2) ** 2 + M[1] ** 2);
        element("p", { class: "matrix", "data-name": name }, side,
          name + " = [" + number(M[0]) + "  " + number(M[1]) + "; " + number(M[1]) + "  " + number(M[2]) + "], smallest eigenvalue " + number(lowest));
      }
      root.dataset.state = x.toFixed(4) + "," + y.toFixed(4);
    }

    function move(event) {
      const [x, y] = position(event, picture);
      anchor[0] = Math.min(high[0], Math.max(low[0], low[0] + x * (high[0] - low[0])));
      anchor[1] = Math.min(high[1], Math.max(low[1], high[1] - y * (high[1] - low[1])));
      draw();
    }
    picture.addEventListener("pointerdown", (event) => { picture.setPointerCapture(event.pointerId); move(event); });
    picture.addEventListener("pointermove", (event) => { if (event.buttons) move(event); });
    picture.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] }[event.key];
      if (!step) return;
      event.preventDefault();
      anchor[0] = Math.min(high[0], Math.max(low[0], anchor[0] + step[0]));
      anchor[1] = Math.min(high[1], Math.max(low[1], anchor[1] + step[1]));
      draw();
    });
    draw();
  }

  function samples(root, data) {
    const label = element("label", {}, root, "samples per example ");
    const slider = element("input", { type: "range", min: 0, max: data.samples.length - 1, value: 0, step: 1 }, label);
    const said = element("p", { class: "numbers", "aria-live": "polite" }, root);
    const picture = framed(root, 420, "Heatmap of the Monte Carlo Fisher", blockTicks(data.blocks));
    scale(root, data.limit);
    const out = element("p", { class: "numbers" }, root, "Point at an entry.");
    const current = () => ({ matrix: data.matrices[+slider.value], blocks: data.blocks });
    function draw() {
      const which = +slider.value;
      heatmap(picture, data.matrices[which], data.blocks, data.limit);
      said.textContent = data.samples[which] + (data.samples[which] === 1 ? " sample" : " samples") +
        ", relative error in the spectral norm " + number(data.errors[which]);
      root.dataset.state = String(data.samples[which]);
    }
    slider.addEventListener("input", draw);
    hover(picture, out, current);
    draw();
  }

  function structures(root, data) {
    const chosen = { flattening: data.flattenings[0], structure: data.structures[0] };
    const picture = { on: null };
    for (const [kind, names] of [["flattening", data.flattenings], ["structure", data.structures]]) {
      const group = element("fieldset", {}, root);
      element("legend", {}, group, kind);
      for (const name of names) {
        const label = element("label", {}, group);
        const button = element("input", { type: "radio", name: root.id + kind, value: name }, label);
        button.checked = name === chosen[kind];
        label.append(" " + name);
        button.addEventListener("change", () => { chosen[kind] = name; draw(); });
      }
    }
    picture.on = framed(root, 420, "Heatmap of a curvature matrix", blockTicks(data.blocks));
    scale(root, data.limit);
    const said = element("p", { class: "numbers", "aria-live": "polite" }, root);
    const out = element("p", { class: "numbers" }, root, "Point at an entry.");
    const current = () => ({ matrix: data.matrices[chosen.flattening][chosen.structure], blocks: data.blocks });
    function draw() {
      heatmap(picture.on, current().matrix, data.blocks, data.limit);
      said.textContent = chosen.structure + ", " + chosen.flattening + ": relative error against the exact matrix " +
        number(data.errors[chosen.structure]) + " in the Frobenius norm";
      root.dataset.state = chosen.structure + "," + chosen.flattening;
    }
    hover(picture.on, out, current);
    draw();
  }

  const widgets = { rosenbrock, samples, structures };
  function start() {
    document.querySelectorAll(".play").forEach((root) => {
      const data = JSON.parse(document.getElementById(root.id + "-data").textContent);
      widgets[root.dataset.widget](root, data);
    });
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
