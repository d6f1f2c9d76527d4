/** For lines that tell of a wrong name which one was meant. */

/** The candidate within two edits of `word` (or that starts with it), if any. */
export function nearest(word: string, candidates: readonly string[]): string | undefined {
  const scored = candidates.map((name) => ({
    name,
    edits: name.startsWith(word) && word.length > 1 ? 0 : editDistance(word, name),
  }));
  return scored.filter(({ edits }) => edits <= 2).sort((a, b) => a.edits - b.edits)[0]?.name;
}

function editDistance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, i) => i);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      next[j] = Math.min(row[j]! + 1, next[j - 1]! + 1, row[j - 1]! + (a[i - 1] === b[j - 1] ? 0 : 1));
    }
    row = next;
  }
  return row[b.length]!;
}
