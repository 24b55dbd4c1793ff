// Elements, colours and numbers. Texts are always text nodes: nothing of a model or a reader is read as HTML.

/** Makes an element; `on...` properties are listeners, `style` an object, all others attributes; null is left out. */
export function el(name, properties = {}, ...children) {
  return filled(document.createElement(name), properties, children);
}

/** The same in a picture. */
export function svg(name, properties = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), properties, children);
}

function filled(element, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [one, set] of Object.entries(value)) element.style.setProperty(one, set);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Controls beside one another. */
export function controls(...children) {
  return el("form", { class: "choices", onsubmit: (event) => event.preventDefault() }, ...children);
}

/** What may be wider than the page, and is scrolled by itself, with the keyboard too. */
export function scrolling(label, ...children) {
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, ...children);
}

/** A row of headings of a table. */
export function headings(...texts) {
  return el("thead", {}, el("tr", {}, ...texts.map((text) => el("th", { scope: "col" }, text))));
}

/** A select with its label; options are [value, text]. */
export function choice(id, label, options, value, onChoose) {
  const select = el("select", { id, onchange: () => onChoose(select.value) });
  for (const [one, text] of options) {
    select.append(el("option", { value: one, selected: String(one) === String(value) }, text));
  }
  return el("label", {}, label, " ", select);
}

export function numbered(count) {
  return Array.from({ length: count }, (_, n) => [n, n + 1]);
}

export function percent(value) {
  return `${(100 * value).toFixed(value >= 0.0005 && value < 0.0995 ? 1 : 0)}%`;
}

export function fixed(value, digits = 2) {
  if (!Number.isFinite(value)) return value < 0 ? "−∞" : "∞";
  return value.toFixed(digits).replace(/^-(?=.*[1-9])/, "−").replace("-", "");
}

let palette = null;  // reading a style takes longer than drawing a strip
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (palette = null));

/** The page's colours as [red, green, blue], which follow light and dark. */
function colours() {
  if (palette) return palette;
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim().match(/\w\w/g).map((pair) => parseInt(pair, 16));
  palette = { paper: read("--paper"), low: read("--low"), high: read("--high") };
  return palette;
}

/** A colour between two: `share` 0 is the first. */
export function mixed(from, to, share) {
  return `rgb(${from.map((value, n) => Math.round(value + (to[n] - value) * share)).join(",")})`;
}

/** Numbers as a strip of cells: the more of a colour, the further from 0. Pointing at a cell shows its number. */
export function strip(values, label, scale = null) {
  const numbers = Array.from(values), most = scale ?? Math.max(1e-9, ...numbers.map(Math.abs));
  const { paper, low, high } = colours();
  const canvas = el("canvas", { width: numbers.length, height: 1, class: "strip", role: "img", "aria-label": label });
  const context = canvas.getContext("2d");
  numbers.forEach((value, n) => {
    context.fillStyle = mixed(paper, value < 0 ? low : high, Math.min(1, Math.abs(value) / most));
    context.fillRect(n, 0, 1, 1);
  });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const n = Math.floor(((event.clientX - box.left) / box.width) * numbers.length);
    if (n in numbers) canvas.title = `[${n}] = ${fixed(numbers[n], 3)}`;
  });
  return canvas;
}

/** A matrix of weights from 0 to 1, rows of lists; missing ones are hatched. `onChoose` is told the row pressed. */
export function matrix(rows, columns, label, chosen, onChoose = null) {
  const side = Math.max(2, Math.min(22, Math.floor(360 / Math.max(columns, rows.length))));
  const { paper, high } = colours();
  const canvas = el("canvas", {
    width: side * columns, height: side * rows.length, role: "img", "aria-label": label, class: "matrix",
  });
  const context = canvas.getContext("2d");
  rows.forEach((row, n) => {
    for (let column = 0; column < columns; column++) {
      const x = side * column, y = side * n, isMasked = column >= row.length;
      context.fillStyle = mixed(paper, high, isMasked ? 0 : row[column]);
      context.fillRect(x, y, side - 1, side - 1);
      if (isMasked) {
        context.strokeStyle = mixed(paper, high, 0.25);
        context.beginPath();
        context.moveTo(x + 2, y + side - 3);
        context.lineTo(x + side - 3, y + 2);
        context.stroke();
      }
    }
    if (n === chosen) {
      context.strokeStyle = mixed(paper, high, 1);
      context.lineWidth = 2;
      context.strokeRect(1, side * n, side * columns - 2, side - 1);
      context.lineWidth = 1;
    }
  });
  if (onChoose) {
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      onChoose(Math.min(rows.length - 1, Math.floor(((event.clientY - box.top) / box.height) * rows.length)));
    });
  }
  return canvas;
}
