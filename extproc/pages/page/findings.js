// What the indexer's and the picker's findings mean and what to do: the table of docs/reference/findings.md (a test keeps
// it equal).

export const FINDINGS = {
  "no-events": ["The pod fills blocks, and for 30 s no event has come of it.", "Check --kv-events-config and the events address."],
  "short-prompts": ["50 requests and no event: no prompt fills one of its large blocks.", "Smaller blocks, or accept balancing by load."],
  "nothing-indexed": ["The pod finds prompts in its cache, the index holds none of its blocks.", "See which events are left out."],
  "block-size-changed": ["Events, index and pod disagree on the block size, or it has changed.", "Look for two pods at one address; clear the source."],
  "decode-errors": ["Events could not be understood in the last 5 minutes.", "Update kvmesh, or check the address."],
  "stuck-in-replay": ["30 s of replay without a batch.", "Check the replay address."],
  "share-reached": ["A pod wants more of the index than one pod may have.", "Look for cleared caches, many ranks, a lost history."],
  "batch-skipped": ["A batch could not be applied twice; the stream's blocks were let go.", "Report the errors in the log; kvmesh index clear."],
  "never-matches": ["The picker: a pod hits our prompts, we never predict it.", "Compare model, seed, tokenizer, template."],
  "cache-overpredicted": ["The picker, of a model: much of what it expected in caches was not there.", "kvmesh index verify; look for missed events."],
  "cache-underpredicted": ["The picker, of a model: much was in caches that it did not expect.", "Compare tokens and block size; look for events."],
  "other-prompt-tokens": ["The picker, of a model: pods count other prompt lengths than it does.", "Compare tokenizer and template."],
  "tokens-differ": ["The picker, of a model: its folder or its pods tell other tokens than the pods have.", "kvmesh doctor; correct the folder."],
  "tokenizer-folder": ["The picker, of a model: its folder cannot be loaded.", "What the message says."],
  "text-only": ["The picker, of a model: most of its last prompts had no tokens, only text.", "Give it a folder, or pods that answer /tokenize."],
  "models-unknown": ["The picker, of a pool: requests come, and no pod has told its models.", "See what /v1/models answers; declare the model."],
};

const known = (finding) => (Object.hasOwn(FINDINGS, finding.check) ? FINDINGS[finding.check] : ["", ""]);

/** What to do: the finding's own words, else those of the docs. */
export const fixOf = (finding) => finding.fix || known(finding)[1];
export const meaningOf = (finding) => known(finding)[0];
