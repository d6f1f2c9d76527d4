/**
 * The consumer of `bench events`, a process of its own: KvEventSubscriber's words, or a plain ZeroMQ subscriber (arguments: events or
 * plain, and the endpoint). Says {ready} after the first message of all. Told {expect: n} it answers {events, gaps} when n more
 * batches have come; the gap that every late joiner sees is none of them, nor are warm-up batches (AllBlocksCleared alone, or one byte).
 */
import { KvEventSubscriber, recordType } from '@kvtier/events';
import { Subscriber } from 'zeromq';

const [mode, endpoint] = process.argv.slice(2) as ['events' | 'plain', string];
let wanted = 0;
let batches = 0;
let events = 0;
let gaps = 0;
let isReady = false;

process.on('message', ({ expect }: { expect: number }) => {
  wanted = expect;
  report();
});
process.on('disconnect', () => process.exit(0));

function arrived(count: number, isWarmUp: boolean): void {
  if (!isReady) process.send!({ ready: true });
  isReady = true;
  if (isWarmUp) return;
  batches++;
  events += count;
  report();
}

function report(): void {
  if (wanted === 0 || batches < wanted) return;
  process.send!({ events, gaps });
  wanted = 0;
  batches = 0;
  events = 0;
}

if (mode === 'events') {
  for await (const burst of new KvEventSubscriber({ endpoint }).packed()) {
    for (const item of burst) {
      if (item.kind === 'batch') arrived(item.batch.count, item.batch.words[item.batch.from] === recordType.cleared);
      else if (isReady) gaps++;
    }
  }
} else {
  const socket = new Subscriber({ linger: 0, receiveHighWaterMark: 10_000 });
  socket.subscribe('');
  socket.connect(endpoint);
  for await (const [, , payload] of socket) arrived(1, payload!.length === 1);
}
