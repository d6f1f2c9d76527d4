/** What was written on the command line, or in a file that it names, and cannot work: another start fails alike until it is mended. */
import { KvError } from '@kvtier/errors';

export const miswritten = (message: string): KvError => new KvError('CONFIG', message, { isFinal: true });
