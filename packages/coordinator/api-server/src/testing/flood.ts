/**
 * Many clients that send the same large nonsense at once, in a process of its own: what it costs is not the test's.
 * Arguments: PORT PATH KIND CLIENTS BYTES. On stdin: one line starts it. Prints {statuses: {code: count}, ms} as one line of JSON.
 */
import { connect } from 'node:net';

/** Bodies of `bytes` bytes, as near as their parts allow. */
const kinds: Readonly<Record<string, (bytes: number) => string>> = {
  messages: (bytes) => around('{"messages":[', '{"role":"user","content":"a"}', ']}', bytes),
  keys: (bytes) => {
    const parts: string[] = [];
    for (let length = 2; length < bytes - 16; length += parts.at(-1)!.length + 1) parts.push(`"k${parts.length}":1`);
    return `{${parts.join(',')}}`;
  },
  nesting: (bytes) => `{"prompt":${'['.repeat(bytes / 2 - 8)}${']'.repeat(bytes / 2 - 8)}}`,
  text: (bytes) => `{"prompt":"${' John Doe'.repeat(bytes / 9 - 2)}"}`,
  numbers: (bytes) => around('{"prompt":[', '1', ']}', bytes),
  parts: (bytes) => around('{"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', ']}]}', bytes),
};

function around(head: string, part: string, tail: string, bytes: number): string {
  const count = Math.floor((bytes - head.length - tail.length) / (part.length + 1));
  return `${head}${`${part},`.repeat(count - 1)}${part}${tail}`;
}

function ask(port: number, head: string, body: Buffer): Promise<string> {
  return new Promise((resolve) => {
    const socket = connect(port, '127.0.0.1');
    let answer = '';
    socket.on('data', (bytes) => {
      answer += bytes.toString('latin1');
      // Answers of the kinds that are tested here are short and come in one piece.
      resolve(answer.slice(9, 12));
      socket.destroy();
    });
    socket.on('error', (error: NodeJS.ErrnoException) => resolve(error.code ?? 'error'));
    socket.on('close', () => resolve('closed'));
    socket.write(head);
    socket.write(body);
  });
}

const [port, path, kind, clients, bytes] = process.argv.slice(2);
const body = Buffer.from(kinds[kind!]!(Number(bytes)));
const head =
  `POST ${path} HTTP/1.1\r\nhost: 127.0.0.1:${port}\r\ncontent-type: application/json\r\n` +
  `content-length: ${body.length}\r\n\r\n`;
process.stdout.write('ready\n');
process.stdin.once('data', async () => {
  const start = performance.now();
  const answers = await Promise.all(Array.from({ length: Number(clients) }, () => ask(Number(port), head, body)));
  const statuses: Record<string, number> = {};
  for (const answer of answers) statuses[answer] = (statuses[answer] ?? 0) + 1;
  process.stdout.write(`${JSON.stringify({ statuses, ms: Math.round(performance.now() - start) })}\n`);
  process.exit(0);
});
