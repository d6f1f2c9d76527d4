/** ZeroMQ leaves the files of its Unix sockets. */
import { rmSync, statSync } from 'node:fs';

/** Removes those that are still ours when it is called: a successor may have bound there. */
export function socketFiles(endpoints: readonly (string | null)[]): () => void {
  const inode = (path: string): number | undefined => statSync(path, { throwIfNoEntry: false })?.ino;
  const files = endpoints.flatMap((endpoint) => {
    const path = endpoint?.startsWith('ipc:///') ? endpoint.slice('ipc://'.length) : undefined;
    return path === undefined ? [] : [{ path, bound: inode(path) }];
  });
  return () => {
    for (const { path, bound } of files)
      if (bound !== undefined && inode(path) === bound) rmSync(path, { force: true });
  };
}
