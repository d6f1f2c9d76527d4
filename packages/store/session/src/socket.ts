/**
 * A Unix socket that only this user can reach: mode 0600 from its first moment, in a folder that only its owner, this user or
 * root, may write to; it is made 0700 when it is not there. With a group: 0660 and 0750, of that group. A socket file that a dead process left is replaced; one that somebody serves is KvError LOCKED.
 */
import { chmodSync, chownSync, existsSync, lstatSync, mkdirSync, unlinkSync } from 'node:fs';
import net from 'node:net';
import path from 'node:path';
import { KvError } from '@kvtier/errors';
import { checkSocketFolder } from '@kvtier/wire';

/** sockaddr_un.sun_path, less its terminating zero. */
const maxPathBytes = 107;

/** Returns the inode of the socket file, for `removeSocket`. */
export async function listenPrivately(
  server: net.Server,
  socketPath: string,
  group: number | null = null,
): Promise<bigint> {
  checkLength(socketPath);
  const folder = path.dirname(socketPath);
  try {
    const isNew = mkdirSync(folder, { recursive: true, mode: 0o700 }) !== undefined;
    checkSocketFolder(socketPath);
    if (isNew && group !== null) giveTo(folder, group, 0o750);
    await removeStale(socketPath);
    await listen(server, socketPath);
    if (group === null) chmodSync(socketPath, 0o600);
    else giveTo(socketPath, group, 0o660);
    return lstatSync(socketPath, { bigint: true }).ino;
  } catch (error) {
    if (error instanceof KvError) throw error;
    throw new KvError(
      'SETUP',
      `${socketPath}: cannot listen there (${(error as Error).message}); choose a writable folder`,
      {
        cause: error,
      },
    );
  }
}

/** Of a socket that is to be made there, without making anything. @throws KvError CONFIG, SETUP as a start */
export function checkSocketPath(socketPath: string): void {
  checkLength(socketPath);
  if (existsSync(path.dirname(socketPath))) checkSocketFolder(socketPath);
}

function checkLength(socketPath: string): void {
  if (Buffer.byteLength(socketPath) > maxPathBytes) {
    throw new KvError(
      'CONFIG',
      `${socketPath}: longer than the ${maxPathBytes} bytes a socket path may have; choose a shorter one`,
    );
  }
}

function giveTo(file: string, group: number, mode: number): void {
  chownSync(file, process.geteuid?.() ?? 0, group);
  chmodSync(file, mode);
}

/** Remove our socket file, and not the one that a successor has put there. */
export function removeSocket(socketPath: string, inode: bigint): void {
  try {
    if (lstatSync(socketPath, { bigint: true }).ino === inode) unlinkSync(socketPath);
  } catch {
    // gone already
  }
}

async function removeStale(socketPath: string): Promise<void> {
  const found = lstatSync(socketPath, { throwIfNoEntry: false });
  if (found === undefined) return;
  if (!found.isSocket()) {
    throw new KvError('SETUP', `${socketPath}: exists and is no socket; remove it or choose another socketPath`);
  }
  if (await isServed(socketPath)) {
    throw new KvError(
      'LOCKED',
      `${socketPath}: another process serves this socket; stop it or choose another socketPath`,
    );
  }
  unlinkSync(socketPath);
}

function isServed(socketPath: string): Promise<boolean> {
  return new Promise((resolve, reject) => {
    const probe = net.connect(socketPath);
    probe.once('connect', () => {
      probe.destroy();
      resolve(true);
    });
    probe.once('error', (error: NodeJS.ErrnoException) => {
      if (error.code === 'ECONNREFUSED' || error.code === 'ENOENT') resolve(false);
      else if (error.code === 'EAGAIN') resolve(true);
      else reject(error);
    });
  });
}

function listen(server: net.Server, socketPath: string): Promise<void> {
  return new Promise((resolve, reject) => {
    server.once('error', reject);
    // bind(2) happens inside listen(): with this mask there is no moment in which others could connect.
    const mask = process.umask(0o177);
    try {
      server.listen(socketPath, () => {
        server.off('error', reject);
        resolve();
      });
    } finally {
      process.umask(mask);
    }
  });
}
