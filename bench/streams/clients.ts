/**
 * A process with many clients, each with one answer after another, through a coordinator (TARGET is its URL) or straight from the fake
 * engines (TARGET is their folder). Arguments: TARGET CLIENTS SECONDS ANSWER_TOKENS PROMPT_TOKENS ENGINES. Prints "counting" when all
 * clients have begun and what comes then counts, for so many seconds; at the end one line of JSON.
 *
 * Each client's first answer has another length, so that from then on answers begin and end evenly over time.
 */
import { Agent, request } from 'node:http';
import { setTimeout as sleep } from 'node:timers/promises';
import { channelOptions, clientCredentials, EngineClient, type GenerateEvent } from '@kvtier/wire/grpc';
import { since } from './stamp.ts';

const [target, clients, seconds, answerTokens, promptTokens, engines] = process.argv.slice(2) as [string, ...string[]];
/** Clients begin over so long; then everything settles for a while. */
const beginMs = 4 * Number(clients);
const settleMs = Math.max(3 * Number(clients), 500);
const countsFromMs = performance.now() + beginMs + settleMs;
const endMs = countsFromMs + Number(seconds) * 1_000;

let skippedUntilMs = 0;
process.on('message', () => {
  skippedUntilMs = performance.now() + 1_000;
});
process.on('disconnect', () => process.exit()); // who started it has ended, however
process.channel?.unref();

/** Counts by tens of microseconds. */
class Times {
  readonly #counts = new Float64Array(200_000);
  #count = 0;

  add(us: number): void {
    const nowMs = performance.now();
    if (nowMs < countsFromMs || nowMs > endMs || nowMs < skippedUntilMs) return;
    this.#counts[Math.min(Math.max(Math.round(us / 10), 0), this.#counts.length - 1)]!++;
    this.#count++;
  }

  /** Milliseconds. */
  at(share: number): number {
    let left = this.#count * share;
    for (let i = 0; i < this.#counts.length; i++) {
      left -= this.#counts[i]!;
      if (left <= 0) return i / 100;
    }
    return Number.NaN;
  }

  get told() {
    return { count: this.#count, p50: this.at(0.5), p90: this.at(0.9), p99: this.at(0.99), p999: this.at(0.999) };
  }
}

const [first, way, gaps] = [new Times(), new Times(), new Times()];
let tokens = 0;
let answers = 0;
const errors = new Map<string, number>();

/** One answer's tokens as they come. */
class Reader {
  readonly #begunMs = performance.now();
  #lastMs = 0;

  token(stamped: number): void {
    const nowMs = performance.now();
    if (nowMs >= countsFromMs && nowMs <= endMs) tokens++;
    if (this.#lastMs === 0) first.add((nowMs - this.#begunMs) * 1_000);
    else gaps.add((nowMs - this.#lastMs) * 1_000);
    way.add(since(stamped));
    this.#lastMs = nowMs;
  }
}

const prompt = (client: number): number[] =>
  Array.from({ length: Number(promptTokens) }, (_, i) => 3 + ((client + i * 7) % 3_000));

/** With each token comes the moment it was written (fake-engines.ts). */
const idsOf = (tokens: number): number => 2 * tokens;

/** Asks for an answer of so many tokens. */
type Ask = (client: number, answerTokens: number) => Promise<void>;

function throughCoordinator(): Ask {
  const agent = new Agent({ keepAlive: true, maxSockets: Number(clients) });
  const url = new URL(target);
  const mark = '"token_ids":[';
  return (client, maxTokens) =>
    new Promise((resolve, reject) => {
      const reader = new Reader();
      const body = JSON.stringify({
        prompt: prompt(client),
        max_tokens: idsOf(maxTokens),
        stream: true,
        return_token_ids: true,
        temperature: 0,
      });
      const headers = { 'content-type': 'application/json', 'content-length': Buffer.byteLength(body) };
      const asked = request(
        { agent, host: url.hostname, port: url.port, method: 'POST', path: '/v1/completions', headers },
        (response) => {
          if (response.statusCode !== 200) {
            response.resume();
            reject(new Error(`status ${response.statusCode}`));
            return;
          }
          let rest = '';
          let done = false;
          response.setEncoding('latin1').on('data', (text: string) => {
            rest += text;
            for (let at = rest.indexOf('\n\n'); at !== -1; at = rest.indexOf('\n\n')) {
              const event = rest.slice(0, at);
              rest = rest.slice(at + 2);
              const ids = event.indexOf(mark);
              if (ids !== -1) reader.token(Number(event.slice(event.indexOf(',', ids) + 1, event.indexOf(']', ids))));
              else if (event === 'data: [DONE]') done = true;
              else if (event.includes('"error"')) reject(new Error(event.slice(0, 200)));
            }
          });
          response.once('end', () => (done ? resolve() : reject(new Error('cut'))));
          response.once('error', reject);
        },
      );
      asked.once('error', reject);
      asked.end(body);
    });
}

function straight(): Ask {
  const lines = Array.from({ length: Number(engines) }, (_, i) => {
    const address = `unix:${target}/e${i}`;
    const options = { ...channelOptions, 'grpc.use_local_subchannel_pool': 1 };
    return new EngineClient(address, clientCredentials(address), options);
  });
  return (client, maxTokens) =>
    new Promise((resolve, reject) => {
      const reader = new Reader();
      const call = lines[client % lines.length]!.generate({
        requestId: `${client}`,
        promptTokenIds: prompt(client),
        maxTokens: idsOf(maxTokens),
        temperature: 0,
        topK: 0,
        topP: 1,
        ignoreEos: false,
        stopTokenIds: [],
        cacheSalt: '',
        loraName: '',
      });
      call.on('data', ({ tokenIds }: GenerateEvent) => reader.token(tokenIds[1]!));
      call.once('end', resolve);
      call.once('error', reject);
    });
}

const ask = target.startsWith('http') ? throughCoordinator() : straight();
async function run(client: number): Promise<void> {
  await sleep((client * beginMs) / Number(clients));
  let length = 1 + (client % Number(answerTokens));
  while (performance.now() < endMs) {
    try {
      await ask(client, length);
      answers++;
    } catch (error) {
      const { message } = error as Error;
      errors.set(message, (errors.get(message) ?? 0) + 1);
    }
    length = Number(answerTokens);
  }
}

const all = Array.from({ length: Number(clients) }, (_, client) => run(client));
await sleep(countsFromMs - performance.now());
process.stdout.write('counting\n');
const cpuBefore = process.cpuUsage();
await sleep(endMs - performance.now());
const { user, system } = process.cpuUsage(cpuBefore);
const told = {
  tokens,
  answers,
  errors: Object.fromEntries(errors),
  first: first.told,
  way: way.told,
  gaps: gaps.told,
  cpuS: (user + system) / 1e6,
};
process.stdout.write(`${JSON.stringify(told)}\n`);
await Promise.race([Promise.all(all), sleep(1_000)]);
process.exit(0);
