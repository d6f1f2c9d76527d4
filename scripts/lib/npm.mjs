/**
 * npm packages, exactly as package-lock.json has them. A stamp beside them holds the digest of the lockfile they came from, so
 * that a pull that changes the lockfile installs again and nothing else does.
 */
import { createHash } from 'node:crypto';
import { existsSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { command, root } from './command.mjs';
import { step } from './progress.mjs';

const lockfile = join(root, 'package-lock.json');
const hidden = join(root, 'node_modules/.package-lock.json'); // npm writes it last
const stampFile = join(root, 'node_modules/.kvtier-stamp');

/** Digest of what node_modules should hold: the lockfile's node_modules entries; our own workspaces are links there. */
function wanted() {
  const installed = Object.entries(JSON.parse(readFileSync(lockfile, 'utf8')).packages).filter(([path]) =>
    path.startsWith('node_modules/'),
  );
  return createHash('sha256')
    .update(`${process.platform} ${process.arch}\n`)
    .update(JSON.stringify(installed))
    .digest('hex');
}

export function npmIsCurrent() {
  if (!existsSync(hidden)) return false;
  if (existsSync(stampFile)) return readFileSync(stampFile, 'utf8') === wanted();
  return statSync(hidden).mtimeMs >= statSync(lockfile).mtimeMs; // somebody ran npm by hand
}

export async function ensureNpmPackages() {
  if (!npmIsCurrent()) {
    // Dependencies bring no install scripts that we need; ours are run by us.
    await step('npm packages', (note) =>
      command('npm', ['ci', '--ignore-scripts', '--no-audit', '--no-fund', '--loglevel=error', '--include=dev'], {
        note,
        remedy: 'is the npm registry reachable? run: npm ci',
      }),
    );
  }
  if (!existsSync(stampFile) || readFileSync(stampFile, 'utf8') !== wanted()) writeFileSync(stampFile, wanted());
}
