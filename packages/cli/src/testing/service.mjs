/**
 * A small service for the supervisor's tests, a real process with a real IPC channel. MODE: "run" is well-behaved, "refuse" fails
 * at start, "deaf" ignores SIGTERM. Each life appends a line to LOG, and one when it is told to end.
 */
import { appendFileSync } from 'node:fs';

const { NAME, MODE, LOG } = process.env;
const note = (what) => appendFileSync(LOG, `${NAME} ${what}\n`);

if (MODE === 'refuse') {
  process.stderr.write(`${NAME}: LOCKED: the folder is held by another process\n`);
  process.exit(1);
}
note('start');
process.on('SIGTERM', () => {
  note('term');
  if (MODE !== 'deaf') process.exit(0);
});
process.on('disconnect', () => {
  note('orphan');
  process.exit(0);
});
process.stdout.write(`hello from ${NAME}\n`);
process.send({ ready: { name: NAME } });
