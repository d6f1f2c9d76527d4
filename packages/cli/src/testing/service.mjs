/**
 * A small service for the supervisor's tests, a real process with a real IPC channel. MODE: "run" is well-behaved, "refuse" and
 * "miswritten" fail at start, "deaf" ignores SIGTERM, "still" stands still once its supervisor knows it as ready, "slow" takes a second to end, and says so, "holding" has
 * a child that outlives it and holds its output open. Each life appends a line to LOG, and one when it is told to end.
 */
import { spawn } from 'node:child_process';
import { appendFileSync } from 'node:fs';

const { NAME, MODE, LOG } = process.env;
const note = (what) => appendFileSync(LOG, `${NAME} ${what}\n`);

if (MODE === 'refuse') {
  process.stderr.write(`${NAME}: LOCKED: the folder is held by another process\n`);
  process.exit(1);
}
if (MODE === 'miswritten') {
  process.stderr.write(`${NAME}: CONFIG: port: is required\n`);
  process.exit(78);
}
note('start');
process.on('SIGTERM', () => {
  note('term');
  if (MODE === 'slow') {
    setTimeout(() => {
      note('end');
      process.exit(0);
    }, 1_000);
  } else if (MODE !== 'deaf') process.exit(0);
});
process.on('message', ({ ping }) => process.send({ pong: ping }));
process.on('disconnect', () => {
  note('orphan');
  process.exit(0);
});
process.stdout.write(`hello from ${NAME}\n`);
if (MODE === 'holding') note(`holder ${spawn('sleep', ['60'], { stdio: 'inherit', detached: true }).pid}`);
process.send({ ready: { name: NAME } }, () => {
  // Not for ever: nobody is left to kill it when its test fails.
  if (MODE === 'still') for (const end = Date.now() + 30_000; Date.now() < end; );
});
