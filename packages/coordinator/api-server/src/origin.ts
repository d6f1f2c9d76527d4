/**
 * Web pages are not answered: a browser carries their requests here from anywhere.
 *
 * Invariants: on loopback a name that is not this machine's (DNS rebinding makes a page's own name point to 127.0.0.1) is refused, and
 * everywhere what a browser says comes from another site. Programs send neither header, or the right ones.
 */
import type { IncomingHttpHeaders } from 'node:http';
import { HttpError } from './errors.ts';

const ownNames = new Set(['127.0.0.1', 'localhost', '[::1]']);
/** Of a page that the API server itself served, and of an address that the user typed. */
const ownSites = new Set(['same-origin', 'none']);

/** Decides on the head alone, before a body is read. @throws HttpError 403 */
export function checkOrigin(headers: IncomingHttpHeaders, isLocal: boolean, scheme: 'http' | 'https'): void {
  const { host, origin } = headers;
  // Without a Host (HTTP/1.0) it is no browser.
  if (isLocal && host !== undefined && !ownNames.has(host.replace(/:\d*$/, '').toLowerCase())) {
    throw refused(
      'host_not_allowed',
      `Host '${clip(host)}' is not this server's; ask 127.0.0.1 or localhost. A proxy has to set Host so.`,
    );
  }
  const site = headers['sec-fetch-site'];
  if (
    (site !== undefined && !ownSites.has(String(site))) ||
    (origin !== undefined && origin !== `${scheme}://${host}`)
  ) {
    throw refused(
      'cross_site',
      `Requests of web pages of other sites (${clip(origin ?? String(site))}) are not answered.`,
    );
  }
}

const refused = (code: string, message: string): HttpError =>
  new HttpError(403, message, { code, type: 'permission_error' });

const clip = (text: string): string => text.slice(0, 200);
