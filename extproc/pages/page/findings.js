// What the indexer's and the picker's findings mean and what to do: the table of docs/reference/findings.md (a test keeps
// it equal).

export const FINDINGS = {
  "no-events": ["The pod fills blocks, but sent no event for 30 s.", "Check --kv-events-config and the events address."],
  "short-prompts": ["50 requests and no event: no prompt fills one of its large blocks.", "Smaller blocks, or accept balancing by load."],
  "nothing-indexed": ["The pod has cache hits, the index has none of its blocks.", "See which events are left out."],
  "block-size-changed": ["Events, index and pod disagree on the block size, or it has changed.", "Look for two pods at one address; clear the source."],
  "decode-errors": ["Unreadable events in the last 5 minutes.", "Update kvmesh, or check the address."],
  "stuck-in-replay": ["30 s of replay without a batch.", "Check the replay address."],
  "share-reached": ["A pod exceeds its share of the index.", "Look for cleared caches, many ranks, a lost history."],
  "batch-skipped": ["A batch failed twice; the stream's blocks were dropped.", "Report the errors in the log; kvmesh index clear."],
  "cache-overpredicted": ["Picker, of a model: many expected cache hits were missing.", "kvmesh index verify; look for missed events."],
  "cache-underpredicted": ["Picker, of a model: many cache hits were unexpected.", "Compare tokens and block size; look for events."],
  "other-prompt-tokens": ["Picker, of a model: pods count other prompt lengths.", "Compare tokenizer and template."],
  "tokens-differ": ["Picker, of a model: its token source differs from the pods.", "kvmesh doctor; correct the folder."],
  "tokenizer-folder": ["Picker, of a model: its folder cannot be loaded.", "See the message."],
  "template-limits": ["Picker, of a model: its chat template takes too much time or memory.", "Read the template; correct the folder."],
  "text-only": ["Picker, of a model: most recent prompts had no tokens, only text.", "Give it a folder, or pods that answer /tokenize."],
  "models-unknown": ["Picker, of a pool: no pod has named its models.", "See what /v1/models answers; declare the model."],
};

const known = (finding) => (Object.hasOwn(FINDINGS, finding.check) ? FINDINGS[finding.check] : ["", ""]);

/** What to do: the finding's own words, else those of the docs. */
export const fixOf = (finding) => finding.fix || known(finding)[1];
export const meaningOf = (finding) => known(finding)[0];
