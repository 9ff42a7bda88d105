"use strict";
// Shows the values under the pointer, and lets the legends switch curves on and off.
(() => {
  const short = (value) => String(Number(value.toPrecision(4)));
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;

  function nearestPoint(area, axes, box, px, py) {
    let best = { distance: 40 };
    for (const path of area.querySelectorAll("path.line")) {
      if (path.closest(".off")) continue;
      const numbers = path.getAttribute("d").match(/-?[\d.]+/g) || [];
      for (let i = 0; i < numbers.length; i += 2) {
        const [u, v] = [numbers[i] / 1000, numbers[i + 1] / 1000];
        const distance = Math.hypot(u * box.width - px, v * box.height - py);
        if (distance < best.distance) best = { distance, u, v, name: path.dataset.name };
      }
    }
    if (best.name === undefined) return "";
    const [xLow, xHigh, xLabel] = axes.x, [yLow, yHigh, yLabel] = axes.y;
    return [best.name, axes.title === best.name ? "" : axes.title,
      `${xLabel}: ${short(xLow + best.u * (xHigh - xLow))}`,
      `${yLabel || best.name}: ${short(yHigh - best.v * (yHigh - yLow))}`].filter(Boolean).join("\n");
  }

  function pixel(image, u, row) { // the colour of a cell; the image is one pixel high per row
    if (!image.cells) {
      const source = new Image();
      source.src = image.getAttribute("href");
      if (!source.complete) return null; // the next movement finds it
      image.cells = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      [image.cells.canvas.width, image.cells.canvas.height] = [source.naturalWidth, source.naturalHeight];
      image.cells.drawImage(source, 0, 0);
    }
    return image.cells.getImageData(Math.floor(u * image.cells.canvas.width), row, 1, 1).data;
  }

  function probability(colour, shades) { // that of the shade nearest to a colour
    const parts = shades.map((shade) => [1, 3, 5].map((i) => parseInt(shade.slice(i, i + 2), 16)));
    let best = [Infinity, 0];
    for (let level = 0; level <= 254; level += 1) {
      const place = (level / 254) * (shades.length - 1), lower = Math.min(Math.floor(place), shades.length - 2);
      const off = parts[lower].map((a, i) => a + (place - lower) * (parts[lower + 1][i] - a) - colour[i]);
      if (Math.hypot(...off) < best[0]) best = [Math.hypot(...off), level / 254];
    }
    return best[1].toFixed(2);
  }

  function cell(image, axes, u, v) {
    const row = Math.floor(v * axes.rows.length), colour = pixel(image, u, row);
    if (!colour || colour[3] === 0) return "";
    const x = axes.x[0] + u * (axes.x[1] - axes.x[0]);
    const column = axes.columns.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
    const code = "#" + [...colour].slice(0, 3).map((part) => part.toString(16).padStart(2, "0")).join("");
    const value = axes.names[code] || `probability: ${probability(colour, axes.shades)}`;
    return [axes.title, axes.rows[row], `${axes.x[2]}: ${short(column)}`, value].filter(Boolean).join("\n");
  }

  for (const area of document.querySelectorAll("svg.area")) {
    const axes = JSON.parse(area.dataset.axes), image = area.querySelector("image.cells");
    area.addEventListener("pointermove", (event) => {
      const box = area.querySelector(".back").getBoundingClientRect();
      const px = event.clientX - box.left, py = event.clientY - box.top;
      const u = px / box.width, v = py / box.height, inside = u >= 0 && u < 1 && v >= 0 && v < 1;
      tip.textContent = !inside ? "" : image ? cell(image, axes, u, v) : nearestPoint(area, axes, box, px, py);
      tip.hidden = !tip.textContent;
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 4))}px`;
      tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
    });
    area.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  for (const button of document.querySelectorAll("button.chip")) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      const curves = button.closest("figure").querySelectorAll(`[data-key="${button.dataset.key}"]`);
      for (const curve of curves) curve.classList.toggle("off", !on);
    });
  }
})();
