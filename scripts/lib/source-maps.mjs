/**
 * A source map without what it says of packages: Node parses a map whole when the first stack goes through its file, and those of packages
 * are many times ours. Where a package's code stands the map says nothing, so that its frames are told as they are in the bundle.
 */
const digits = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/';
const valueOfDigit = new Map([...digits].map((digit, value) => [digit, value]));

function decoded(segment) {
  const numbers = [];
  let [value, shift] = [0, 0];
  for (const digit of segment) {
    const bits = valueOfDigit.get(digit);
    value |= (bits & 31) << shift;
    shift += 5;
    if (bits & 32) continue;
    numbers.push(value & 1 ? -(value >> 1) : value >> 1);
    [value, shift] = [0, 0];
  }
  return numbers;
}

function encoded(number) {
  let rest = number < 0 ? (-number << 1) | 1 : number << 1;
  let text = '';
  do {
    text += digits[(rest & 31) | (rest > 31 ? 32 : 0)];
    rest >>>= 5;
  } while (rest > 0);
  return text;
}

/** @param {string} text a map of esbuild's: segments of one, four or five numbers, each told by its distance from the one before */
export function withoutPackages(text) {
  const { sources, mappings, ...rest } = JSON.parse(text);
  const kept = sources.filter((path) => !path.includes('node_modules/'));
  const place = sources.map((path) => kept.indexOf(path));
  const [from, to] = [
    [0, 0, 0, 0],
    [0, 0, 0, 0],
  ]; // source, line, column, name
  let saysSource = false;
  const lines = mappings.split(';').map((line) => {
    let [column, written] = [0, 0];
    const segments = [];
    for (const segment of line === '' ? [] : line.split(',')) {
      const [distance, ...numbers] = decoded(segment);
      column += distance;
      for (const [at, number] of numbers.entries()) from[at] += number;
      const isOurs = numbers.length > 0 && place[from[0]] >= 0;
      if (!isOurs && !saysSource) continue;
      saysSource = isOurs;
      const now = isOurs ? [place[from[0]], ...from.slice(1, numbers.length)] : [];
      segments.push([column - written, ...now.map((number, at) => number - to[at])].map(encoded).join(''));
      written = column;
      for (const [at, number] of now.entries()) to[at] = number;
    }
    return segments.join(',');
  });
  return JSON.stringify({ ...rest, sources: kept, mappings: lines.join(';') });
}
