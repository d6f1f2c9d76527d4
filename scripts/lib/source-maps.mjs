/**
 * What the lines of a bundle are in our sources, of its map: packages' code and columns within a line are most of it, and nobody asks for them.
 * A frame is told with its file and line, and with the column at which that line begins to run; where a package's code stands the table says
 * nothing, so that its frames are told as they are in the bundle.
 */
import { join, relative } from 'node:path';

/**
 * @param {string} text a map, as JSON
 * @param {string} from the folder that its sources are named from
 * @param {string} to the folder that they are to be named from
 * @returns {Promise<Buffer>} for packages/base/telemetry/src/source-lines.ts: rows of int32, names of sources as JSON, bytes of rows (u32)
 */
export async function linesOfOurs(text, from, to) {
  const { decode } = await import('@jridgewell/sourcemap-codec'); // set-up begins without any package
  const { sources, mappings } = JSON.parse(text);
  const kept = sources.filter((path) => !path.includes('node_modules/'));
  const place = sources.map((path) => kept.indexOf(path));
  let said = 'nothing';
  const rows = decode(mappings).flatMap((line, at) =>
    line.flatMap(([column, source, ...original]) => {
      const isOurs = source !== undefined && place[source] >= 0;
      // One row that says nothing ends what the one before it says.
      const says = isOurs ? `${at} ${source} ${original[0]}` : 'nothing';
      if (says === said) return [];
      said = says;
      return isOurs ? [at, column, place[source], original[0], original[1]] : [at, column, -1, 0, 0];
    }),
  );
  const table = Buffer.from(Int32Array.from(rows).buffer);
  const names = Buffer.from(JSON.stringify(kept.map((path) => relative(to, join(from, path)))));
  const length = Buffer.alloc(4);
  length.writeUInt32LE(table.length);
  return Buffer.concat([table, names, length]);
}
