// Reads the weights that Python wrote into the page.
import { Model } from "./model.mjs";

/** Makes the model of the page's data. */
export function modelOf({ config, tensors: entries, aliases, weights }) {
  const { buffer } = bytesOf(weights), tensors = {};
  let place = 0;
  const floats = (count) => {
    const view = new Float32Array(buffer, place, count);
    place += 4 * count;
    return view;
  };
  for (const [name, rows, columns, kind] of entries) {
    if (kind === "float32") {
      tensors[name] = floats(rows * columns);
      continue;
    }
    const scales = floats(rows), bytes = new Int8Array(buffer, place, rows * columns);  // int8: a scale for each row
    place += 4 * Math.ceil((rows * columns) / 4);
    tensors[name] = Float32Array.from(bytes, (value, n) => value * scales[Math.floor(n / columns)]);
  }
  for (const [alias, name] of Object.entries(aliases)) tensors[alias] = tensors[name];
  return new Model(config, tensors);
}

/** The bytes that a base64 string stands for. */
export function bytesOf(base64) {
  const letters = atob(base64), bytes = new Uint8Array(letters.length);
  for (let n = 0; n < letters.length; n++) bytes[n] = letters.charCodeAt(n);
  return bytes;
}
