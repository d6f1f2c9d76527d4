/** The `kvtier` command of this checkout: set up, and run in this process. */
import { setup } from '../setup.mjs';
import { npmIsCurrent } from './npm.mjs';
import { importTypeScript } from './typescript.mjs';

/** What is answered without anything that runs. */
const questions = new Set(['--help', '-h', 'help', '--version', '-v']);

/**
 * @param {readonly string[]} args as of `kvtier`
 * @returns {Promise<number>} its exit code
 */
export async function kvtier(args) {
  const load = () => importTypeScript('packages/cli/src/main.ts');
  // Words are read first where what reads them is there: a question or a slip of the pen needs no native code, and loads none.
  const asks = args.length === 0 || args.some((arg) => questions.has(arg));
  if (asks) await setup({ need: ['npm'] });
  if (npmIsCurrent()) {
    const said = await (await load()).saidAtOnce(args);
    if (said !== undefined) return said;
  }
  await setup();
  return (await load()).main(args);
}
