/** To which pods our bearer token goes. */
import { expect, it } from 'vitest';
import type { Access } from './link.ts';
import { authorizationOf } from './pod-connection.ts';

const [token, trusted] = [{ token: 't' }, { token: 't', trustedNetwork: true }];
const shown = { authorization: 'Bearer t' };

it.each<[string, string, Access | undefined, object]>([
  ['a pod on loopback is shown it', 'http://127.0.0.1:8000', token, shown],
  ['and by its other names', 'http://[::1]:8000', token, shown],
  ['and one beyond by TLS', 'https://10.1.2.3:8000', token, shown],
  ['not in the clear', 'http://10.1.2.3:8000', trusted, {}],
  ['nor by a name', 'http://127.evil.example:8000', trusted, {}],
  ['unless the configuration says so', 'http://10.1.2.3:8000', { ...trusted, tokenInClear: true }, shown],
  ['without one there is none', 'https://10.1.2.3:8000', { trustedNetwork: true }, {}],
  ['nor where nothing is configured', 'http://127.0.0.1:8000', undefined, {}],
])('%s', (_, origin, access, headers) => {
  expect(authorizationOf({ name: 'w', origin: new URL(origin), access })).toEqual(headers);
});
