/**
 * Hashing a 32k-token prompt: our whole path (tokens in a typed array to packed hashes) against vLLM's own recipe in Python,
 * and against the bare SHA-256 of as many bytes, measured in the same run. Rounds are interleaved, figures are medians, and
 * the last hash of every round is compared with Python's: a fast wrong hash is no figure.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import { ChainHasher, type HashAlgorithm, SequenceHashes, serialize } from '@kvtier/identity';
import { argumentsOf } from '../arguments.ts';
import { median, type Suite, time } from '../figures.ts';

const promptTokens = 32_768;
const blockTokens = 16;
const blocks = promptTokens / blockTokens;
const rounds = 15;
const seed = 20_261_121;

/** The same linear congruential sequence as scripts/hash_reference.py. */
function prompt(): Uint32Array {
  const tokens = new Uint32Array(promptTokens);
  let state = seed;
  for (let i = 0; i < promptTokens; i++) {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    tokens[i] = (state >>> 8) % 128_000;
  }
  return tokens;
}

/** The Python process, one question at a time. */
class Reference {
  readonly #child: ChildProcess;
  readonly #lines: AsyncIterator<string>;

  constructor() {
    const script = fileURLToPath(new URL('../scripts/hash_reference.py', import.meta.url));
    this.#child = spawn('/usr/bin/python3', [script], { stdio: ['pipe', 'pipe', 'inherit'] });
    this.#child.on('error', () => {}); // seen as the end of its output
    this.#child.stdin!.on('error', () => {});
    this.#lines = createInterface({ input: this.#child.stdout! })[Symbol.asyncIterator]();
  }

  async measure(): Promise<{ nsPerBlock: number; last: string }> {
    this.#child.stdin!.write(`${JSON.stringify({ tokens: promptTokens, blockTokens, seed })}\n`);
    const line = await this.#lines.next();
    if (line.done) {
      throw new KvError('SETUP', '/usr/bin/python3 with cbor2 does not run; install it: apt-get install python3-cbor2');
    }
    return JSON.parse(line.value) as { nsPerBlock: number; last: string };
  }

  close(): void {
    this.#child.stdin!.end();
  }
}

/** Median over runs in a row for about as long as Python's turn takes, so that a busy machine disturbs both alike. */
function nsPerBlockOf(work: () => void): number {
  const samples: number[] = [];
  const begin = process.hrtime.bigint();
  for (let now = begin; samples.length < 3 || now - begin < 20_000_000n; ) {
    work();
    const end = process.hrtime.bigint();
    samples.push(Number(end - now) / blocks);
    now = end;
  }
  return median(samples);
}

/** Bytes that `algorithm` digests for the whole prompt: every serialised block, for SHA-256 padded to whole pieces. */
function digestedBytes(algorithm: HashAlgorithm, tokens: Uint32Array): number {
  const parent = new ChainHasher({ algorithm, blockTokens }).root;
  let bytes = 0;
  for (let at = 0; at < tokens.length; at += blockTokens) {
    const message = serialize(algorithm, [parent, [...tokens.subarray(at, at + blockTokens)], null]).length;
    bytes += algorithm.startsWith('sha256') ? Math.ceil((message + 9) / 64) * 64 : message;
  }
  return bytes;
}

const suite: Suite = {
  name: 'hash',
  description: 'block hashes of a 32k-token prompt, against Python (hashlib + cbor2) and the bare digest',
  needs: ['python3-cbor2'],
  async run(context) {
    argumentsOf('hash', context.args, {});
    const tokens = prompt();
    const algorithms: readonly HashAlgorithm[] = ['sha256_cbor', 'sha256', 'xxhash_cbor', 'xxhash'];
    const hashers = algorithms.map((algorithm) => new ChainHasher({ algorithm, blockTokens }));
    const ours = new Map<HashAlgorithm, number[]>(algorithms.map((algorithm) => [algorithm, []]));
    const python: number[] = [];
    const grown: number[] = [];
    const bareCbor: number[] = [];
    const barePickle: number[] = [];
    const bareXxh: number[] = [];
    const cborBytes = Buffer.alloc(digestedBytes('sha256_cbor', tokens), 0xa5);
    const pickleBytes = Buffer.alloc(digestedBytes('sha256', tokens), 0xa5);
    const xxhBytes = Buffer.alloc(digestedBytes('xxhash_cbor', tokens), 0xa5);
    const decode = Uint32Array.from({ length: 1 });

    const reference = new Reference();
    try {
      for (let round = -1; round < rounds; round++) {
        const peer = await reference.measure();
        const times = hashers.map((hasher) => {
          let packed: Buffer = Buffer.alloc(0);
          const ns = nsPerBlockOf(() => {
            packed = hasher.hashBlocks(null, tokens);
          });
          const last = packed.subarray(packed.length - hasher.hashBytes).toString('hex');
          if (hasher.algorithm === 'sha256_cbor' && last !== peer.last) {
            throw new KvError('CORRUPT', `sha256_cbor differs from Python: ${last}, not ${peer.last}`);
          }
          return ns;
        });
        const tokenwise = nsPerBlockOf(() => {
          const sequence = new SequenceHashes(hashers[0]!);
          for (let i = 0; i < promptTokens; i++) {
            decode[0] = tokens[i]!;
            sequence.append(decode);
          }
        });
        // The floor is the better of two implementations, so that ours is not its own yardstick.
        const bareNs = (bytes: Buffer) =>
          Math.min(
            nsPerBlockOf(() => void createHash('sha256').update(bytes).digest()),
            nsPerBlockOf(() => void native.sha256(bytes)),
          );
        if (round < 0) continue; // the first round warms up
        for (const [i, ns] of times.entries()) ours.get(algorithms[i]!)!.push(ns);
        python.push(peer.nsPerBlock);
        grown.push(tokenwise);
        bareCbor.push(bareNs(cborBytes));
        barePickle.push(bareNs(pickleBytes));
        bareXxh.push(nsPerBlockOf(() => void native.xxh3_128(xxhBytes)));
      }
    } finally {
      reference.close();
    }
    const nsOf = (algorithm: HashAlgorithm) => median(ours.get(algorithm)!);
    const pythonNs = median(python);
    const pieces = (cborBytes.length / 64 / blocks).toFixed(2);
    context.log(`${blocks} blocks of ${blockTokens} tokens, ${pieces} SHA-256 pieces each; ${rounds} rounds`);
    const peerName = 'Python hashlib + cbor2';
    const shaFloor = 'bare SHA-256 of as many bytes';
    return [
      time('sha256_cbor_vs_python', nsOf('sha256_cbor'), 'ns/block', pythonNs, peerName),
      time('sha256_cbor', nsOf('sha256_cbor'), 'ns/block', median(bareCbor), shaFloor),
      time('sha256', nsOf('sha256'), 'ns/block', median(barePickle), shaFloor),
      time('xxhash_cbor', nsOf('xxhash_cbor'), 'ns/block', median(bareXxh), 'bare XXH3-128 of as many bytes in one'),
      time('xxhash', nsOf('xxhash'), 'ns/block', median(bareXxh), 'bare XXH3-128 of as many bytes in one'),
      time('append_by_token', median(grown), 'ns/block', pythonNs, `${peerName}, the prompt at once`),
    ];
  },
};

export default suite;
