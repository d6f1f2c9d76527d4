/**
 * Unix sockets between processes of one user, or of one group where that is named. Whoever binds a path first is found there, so both
 * sides look: at the folder, in which no one else may put or rename a socket, and at who is at the other end of a connection
 * (SO_PEERCRED). With a group, the folder's owner is trusted if the folder is of that group: containers of a pod have users of their own.
 */
import { statSync } from 'node:fs';
import type { Socket } from 'node:net';
import path from 'node:path';
import { native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';

const othersMayWrite = 0o022;

/**
 * The folder that a socket lies in is ours, root's or of `group`, and only its owner may write there. A folder that is not there is left
 * to whoever uses it. @throws KvError SETUP
 */
export function checkSocketFolder(socketPath: string, group: number | null = null): void {
  const folder = path.dirname(socketPath);
  const found = statSync(folder, { throwIfNoEntry: false });
  if (found === undefined) return;
  if (!isTrusted(found.uid) && found.gid !== group) {
    throw new KvError(
      'SETUP',
      `${folder}: belongs to user ${found.uid}, who could put another socket there; choose a folder of your own`,
    );
  }
  if ((found.mode & othersMayWrite) !== 0) {
    throw new KvError(
      'SETUP',
      `${folder}: others may write there; choose a private folder for the socket, or chmod go-w it`,
    );
  }
}

/** The process at the other end of a connected Unix socket is ours, root's, or of the user whose folder of `group` it is. @throws KvError SETUP */
export function checkServer(socket: Socket, socketPath: string, group: number | null = null): void {
  const { pid, uid } = native.peerCredentials(descriptorOf(socket));
  if (isTrusted(uid)) return;
  const folder = group === null ? undefined : statSync(path.dirname(socketPath), { throwIfNoEntry: false });
  if (folder?.uid === uid && folder.gid === group) return;
  throw new KvError(
    'SETUP',
    `${socketPath}: is served by a process of user ${uid} (pid ${pid}), not by ours; end it or choose a private folder`,
  );
}

/** The file descriptor of a connected socket. @throws KvError SETUP */
export function descriptorOf(socket: Socket): number {
  const fd = (socket as unknown as { readonly _handle?: { readonly fd?: number } })._handle?.fd;
  if (fd === undefined || fd < 0) {
    throw new KvError('SETUP', 'a Unix socket: this Node.js does not tell the descriptor of a socket');
  }
  return fd;
}

const isTrusted = (uid: number): boolean => uid === 0 || uid === process.geteuid?.();
