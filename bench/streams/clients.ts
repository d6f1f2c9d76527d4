/**
 * A process with many clients, each with one answer after another, through a coordinator (TARGET is its URL) or straight from the fake
 * engines (TARGET is their folder). Arguments: TARGET CLIENTS SECONDS ANSWER_TOKENS PROMPT_TOKENS ENGINES STILL_MS. Prints "counting" when
 * all clients have begun and what comes then counts, for so many seconds; at the end one line of JSON. An answer that had no token for
 * STILL_MS then is told as one that hangs.
 *
 * Each client's first answer has another length, so that from then on answers begin and end evenly over time.
 */
import { Agent, request } from 'node:http';
import { setTimeout as sleep } from 'node:timers/promises';
import { channelOptions, clientCredentials, EngineClient, type GenerateEvent } from '@kvtier/wire/grpc';
import { Counting, type Reader } from './counting.ts';
import { since } from './stamp.ts';

const [target, clients, seconds, answerTokens, promptTokens, engines, stillMs] = process.argv.slice(2) as [
  string,
  ...string[],
];
/** Clients begin over so long; then everything settles for a while. */
const beginMs = 4 * Number(clients);
const settleMs = Math.max(3 * Number(clients), 500);
const countsFromMs = performance.now() + beginMs + settleMs;
const endMs = countsFromMs + Number(seconds) * 1_000;

const counting = new Counting({ fromMs: countsFromMs, toMs: endMs });
process.on('message', () => counting.skipUntil(performance.now() + 1_000));
process.on('disconnect', () => process.exit()); // who started it has ended, however
process.channel?.unref();

let answers = 0;
const errors = new Map<string, number>();

const prompt = (client: number): number[] =>
  Array.from({ length: Number(promptTokens) }, (_, i) => 3 + ((client + i * 7) % 3_000));

/** With each token comes the moment it was written (fake-engines.ts). */
const idsOf = (tokens: number): number => 2 * tokens;
/** A coordinator joins what waited for a client. */
function read(reader: Reader, ids: readonly number[]): void {
  for (let i = 1; i < ids.length; i += 2) reader.token(since(ids[i]!));
}

/** Asks for an answer of so many tokens, and reads it to its end. */
type Ask = (client: number, answerTokens: number, reader: Reader) => Promise<void>;

function throughCoordinator(): Ask {
  const agent = new Agent({ keepAlive: true, maxSockets: Number(clients) });
  const url = new URL(target);
  const mark = '"token_ids":[';
  return (client, maxTokens, reader) =>
    new Promise((resolve, reject) => {
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
              if (ids !== -1)
                read(
                  reader,
                  event
                    .slice(ids + mark.length, event.indexOf(']', ids))
                    .split(',')
                    .map(Number),
                );
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
  return (client, maxTokens, reader) =>
    new Promise((resolve, reject) => {
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
      call.on('data', ({ tokenIds }: GenerateEvent) => read(reader, tokenIds));
      call.once('end', resolve);
      call.once('error', reject);
    });
}

const ask = target.startsWith('http') ? throughCoordinator() : straight();
async function run(client: number): Promise<void> {
  await sleep((client * beginMs) / Number(clients));
  let length = 1 + (client % Number(answerTokens));
  while (performance.now() < endMs) {
    const reader = counting.begin();
    try {
      await ask(client, length, reader);
      if (reader.tokens !== length) throw new Error(`${reader.tokens} tokens of ${length}`);
      answers++;
    } catch (error) {
      const { message } = error as Error;
      errors.set(message, (errors.get(message) ?? 0) + 1);
    }
    reader.end();
    length = Number(answerTokens);
  }
}

const all = Array.from({ length: Number(clients) }, (_, client) => run(client));
await sleep(countsFromMs - performance.now());
process.stdout.write('counting\n');
const cpuBefore = process.cpuUsage();
await sleep(endMs - performance.now());
const { user, system } = process.cpuUsage(cpuBefore);
const hanging = counting.end(Number(stillMs));
const told = {
  tokens: counting.tokens,
  answers,
  errors: Object.fromEntries(errors),
  hanging,
  first: counting.first.told,
  way: counting.way.told,
  gaps: counting.gaps.told,
  cpuS: (user + system) / 1e6,
};
process.stdout.write(`${JSON.stringify(told)}\n`);
await Promise.race([Promise.all(all), sleep(1_000)]);
process.exit(0);
