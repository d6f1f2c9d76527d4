/**
 * A source map of lines alone, and of our sources alone: Node parses a map whole when a service starts, and what it says of columns and of
 * packages is many times the rest. A frame is told with its file and line, and with the column at which that line begins to run; where a
 * package's code stands the map says nothing, so that its frames are told as they are in the bundle.
 */

/** @param {string} text a map, as JSON */
export async function linesOfOurs(text) {
  const { decode, encode } = await import('@jridgewell/sourcemap-codec'); // set-up begins without any package
  const { sources, mappings, ...rest } = JSON.parse(text);
  const kept = sources.filter((path) => !path.includes('node_modules/'));
  const place = sources.map((path) => kept.indexOf(path));
  let said = 'nothing';
  const lines = decode(mappings).map((line, at) =>
    line.flatMap(([column, source, ...original]) => {
      const isOurs = source !== undefined && place[source] >= 0;
      // One segment that says nothing ends what the one before it says.
      const says = isOurs ? `${at} ${source} ${original[0]}` : 'nothing';
      if (says === said) return [];
      said = says;
      return [isOurs ? [column, place[source], ...original] : [column]];
    }),
  );
  return JSON.stringify({ ...rest, sources: kept, mappings: encode(lines) });
}
