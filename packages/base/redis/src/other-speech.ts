/** A port where something else than Redis is spoken, or TLS at one end only: what the libraries say of it names neither. */

/** The first byte of an answer that no type of Redis' protocol has: of "HTTP/1.1 ...", of an alert in TLS. */
const [http, tlsAlert] = ['72', '21'];
const thePort = 'name the port of Redis in servers';

/** What it is and how to mend it, in one line; undefined: this error says something else. */
export function spokenOtherwise(message: string): string | undefined {
  const first = /Unknown RESP type (\d+)/.exec(message)?.[1];
  if (first === http) return `the server answers in HTTP, not in Redis' protocol; ${thePort}`;
  if (first === tlsAlert) return 'the server answers in TLS; write rediss: in servers';
  if (first !== undefined) return `the server does not answer in Redis' protocol; ${thePort}`;
  if (/wrong version number|unknown protocol|packet length too long/i.test(message))
    return 'the server does not answer in TLS; write redis: in servers, without tls, or name its port for TLS';
  if (/before secure TLS connection was established/.test(message))
    return 'the server ended the connection before TLS was spoken; write redis: in servers if it speaks none';
  return undefined;
}

/** Of a connection that never stood: a server of TLS resets one of plain bytes, and a plain one waits for more than a greeting of TLS. */
export function connectAdvice(message: string, isTls: boolean): string | undefined {
  if (!isTls && /ECONNRESET|EPIPE/.test(message)) return 'write rediss: in servers if they speak TLS at this port';
  if (isTls && /ETIMEDOUT/.test(message))
    return 'check that servers can be reached; write redis: if they speak no TLS at this port';
  return undefined;
}
