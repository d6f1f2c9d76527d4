/**
 * A source map without what it says of packages: Node parses a map whole when the first stack goes through its file, and those of packages
 * are many times ours. Where a package's code stands the map says nothing, so that its frames are told as they are in the bundle.
 */

/** @param {string} text a map, as JSON */
export async function withoutPackages(text) {
  const { decode, encode } = await import('@jridgewell/sourcemap-codec'); // set-up begins without any package
  const { sources, mappings, ...rest } = JSON.parse(text);
  const kept = sources.filter((path) => !path.includes('node_modules/'));
  const place = sources.map((path) => kept.indexOf(path));
  let saysSource = false;
  const lines = decode(mappings).map((line) =>
    line.flatMap(([column, source, ...original]) => {
      const isOurs = source !== undefined && place[source] >= 0;
      // One segment that says nothing ends what the one before it says.
      const isWanted = isOurs || saysSource;
      saysSource = isOurs;
      return isWanted ? [isOurs ? [column, place[source], ...original] : [column]] : [];
    }),
  );
  return JSON.stringify({ ...rest, sources: kept, mappings: encode(lines) });
}
