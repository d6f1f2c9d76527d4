/** Loads the native data plane: `build/data-plane/kvtier_data_plane.node`, made by `npm run build`. */
import { createRequire } from 'node:module';
import { fileURLToPath } from 'node:url';
import { KvError } from '@kvtier/errors';
import type { NativeBinding } from './binding.ts';

export type {
  ArenaHandle,
  FileIdentity,
  FilesHandle,
  IoHandle,
  KvEventBurst,
  KvEventsHandle,
  MappingHandle,
  NativeBinding,
  PeerHandle,
  PulseHandle,
  ValuesHandle,
} from './binding.ts';

function load(): NativeBinding {
  const file = fileURLToPath(new URL('../../../../build/data-plane/kvtier_data_plane.node', import.meta.url));
  try {
    return createRequire(import.meta.url)(file) as NativeBinding;
  } catch (error) {
    throw new KvError('SETUP', `${file}: cannot be loaded (${(error as Error).message}); run: npm run build`);
  }
}

export const native: NativeBinding = load();
