/** The `kvtier` command as a program of its own. */
import { main } from './main.ts';

process.exitCode = await main(process.argv.slice(2));
