/**
 * Who is answered, decided on a request's head alone, before a body is read. Where keys are configured, each request bears one. Where
 * clients' certificates are, TLS has let nobody else in. On loopback without either, everything on this machine may ask, except web pages.
 *
 * Invariant: beyond loopback, what administers workers is answered to nobody who has not proved who he is, whatever network is trusted.
 */
import type { IncomingHttpHeaders } from 'node:http';
import type { ApiKeys } from './api-keys.ts';
import { HttpError } from './errors.ts';
import { checkOrigin } from './origin.ts';

export interface CallersOptions {
  /** It listens on loopback alone. */
  readonly isLocal: boolean;
  readonly scheme: 'http' | 'https';
  /** TLS lets nobody in without a certificate. */
  readonly isCertified: boolean;
  readonly keys: Pick<ApiKeys, 'has'> | undefined;
  /** Of those who administer; undefined: any of `keys` is one. */
  readonly adminKeys: Pick<ApiKeys, 'has'> | undefined;
}

export class Callers {
  readonly #options: CallersOptions;

  constructor(options: CallersOptions) {
    this.#options = options;
  }

  /** `route`: as it was found, whatever way its path is written. @throws HttpError 401, 403 */
  check(headers: IncomingHttpHeaders, route: string): void {
    const { isLocal, scheme, isCertified, keys, adminKeys } = this.#options;
    checkOrigin(headers, isLocal, scheme);
    const isAdmin = route.startsWith('/admin/');
    if (isAdmin ? (adminKeys ?? keys) !== undefined : keys !== undefined) {
      const key = keyOf(headers);
      if (key === undefined) throw unknown('No API key was sent: send "Authorization: Bearer KEY".');
      const isAdminKey = adminKeys?.has(key) ?? false;
      if (!isAdminKey && !(keys?.has(key) ?? false)) throw unknown('The API key is not known here.');
      if (isAdmin && adminKeys !== undefined && !isAdminKey) throw forbidden('This takes a key of adminKeysFile.');
    } else if (isAdmin && !isLocal && !isCertified) {
      throw forbidden('Beyond loopback this takes a key: configure adminKeysFile.');
    }
  }
}

/** Whatever it asks for: its key is one of those. */
export function bearsKeyOf(keys: Pick<ApiKeys, 'has'> | undefined, headers: IncomingHttpHeaders): boolean {
  const key = keyOf(headers);
  return key !== undefined && (keys?.has(key) ?? false);
}

function keyOf({ authorization }: IncomingHttpHeaders): string | undefined {
  return /^Bearer +(\S{1,512}) *$/i.exec(authorization ?? '')?.[1];
}

/** As OpenAI's API tells it. */
const unknown = (message: string): HttpError => new HttpError(401, message, { code: 'invalid_api_key' });

const forbidden = (message: string): HttpError =>
  new HttpError(403, message, { code: 'admin_key_required', type: 'permission_error' });
