/**
 * The secrets of a file that peers share. It holds one, or two while the secret is changed: two lines of printable characters, each a
 * secret. Whoever shares any of them is a peer, so that files may be changed host by host, in any order.
 *
 * A secret is the bytes of its file, a line break at the end included: so older nodes have it. As files of two lines, and those that
 * Kubernetes mounts, may end with or without one, each is taken both ways, as its file has it first.
 */

export const minSecretBytes = 32;
const lineBreak = 10;

/** In the order in which they are proved; the first is what a node shows that knows of one secret only. @throws Error: it holds none */
export function secretsIn(file: Buffer): readonly Buffer[] {
  const endsLine = file.at(-1) === lineBreak;
  return linesOf(file).flatMap((line) => {
    const ended = Buffer.concat([line, Buffer.of(lineBreak)]);
    const both = endsLine ? [ended, line] : [line, ended];
    if (both[0]!.length < minSecretBytes) throw new Error(`a secret has at least ${minSecretBytes} bytes`);
    return both;
  });
}

/** Without their line breaks. One, if it is not just two: a secret may be any bytes. */
function linesOf(file: Buffer): readonly Buffer[] {
  const whole = file.at(-1) === lineBreak ? file.subarray(0, -1) : file;
  const at = whole.indexOf(lineBreak);
  const two = [whole.subarray(0, at), whole.subarray(at + 1)];
  const isText = (line: Buffer): boolean => line.length > 0 && line.every((byte) => byte > 0x20 && byte < 0x7f);
  return at !== -1 && two.every(isText) ? two : [whole];
}
