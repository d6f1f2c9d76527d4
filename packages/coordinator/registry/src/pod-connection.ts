/** How connections to a pod with OpenAI's API begin: with what the files of `access` hold then. */
import { KvError } from '@kvtier/errors';
import { isLocal } from '@kvtier/wire/grpc';
import { buildConnector } from 'undici';
import type { Access } from './link.ts';

type Connector = ReturnType<typeof buildConnector>;

/** Which pod, and what proves there who we are. */
export interface PodAddress {
  readonly name: string;
  readonly origin: URL;
  readonly access: Access | undefined;
}

/** For a `Pool`; of renewed files the next connection has a new one. */
export function connectorOf(access: Access | undefined, timeoutMs: number): Connector {
  const made = (): { readonly of: Access; readonly connect: Connector } => {
    const { ca, cert, key, serverName } = access ?? {};
    const shown = { ...(ca && { ca }), ...(cert && key && { cert, key }) };
    const named = serverName === undefined ? {} : { servername: serverName };
    return { of: { ca, cert, key }, connect: buildConnector({ timeout: timeoutMs, ...shown, ...named }) };
  };
  let last = made();
  return (options, callback) => {
    const { ca, cert, key } = last.of;
    if (ca !== access?.ca || cert !== access?.cert || key !== access?.key) last = made();
    last.connect(options, callback);
  };
}

/** In the clear nobody is shown the token, unless that is said: everybody on the path would have it. */
export function authorizationOf(pod: PodAddress): Readonly<Record<string, string>> {
  const token = pod.access?.token;
  return token === undefined || keepsToken(pod) ? {} : { authorization: `Bearer ${token}` };
}

/** There is a token, and this pod is not shown it. */
export const keepsToken = ({ origin, access }: PodAddress): boolean =>
  access?.token !== undefined && origin.protocol !== 'https:' && !isLocal(origin.host) && !access.tokenInClear;

export function gone({ name, origin }: PodAddress, why: string): KvError {
  const what = `${origin.origin} cannot be reached or broke off (${why}); it may be restarting, try again`;
  return new KvError('DISCONNECTED', `worker ${name}: ${what}`, { retry: true });
}
