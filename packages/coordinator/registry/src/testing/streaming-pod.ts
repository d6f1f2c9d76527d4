/** A pod in a process of its own: each answer is a stream of tokens without an end. Says its address on stdout. */
import { writeSync } from 'node:fs';
import { Pod } from './pod.ts';

const pod = new Pod();
pod.answer = ({ response }) => {
  const timer = setInterval(() => response.write('data: token\n\n'), 20);
  response.once('close', () => clearInterval(timer));
};
await pod.start();
writeSync(1, `${pod.address}\n`);
