"""English words of which nearly every tokenizer makes one token: random text out of them has a known length. Pure."""

_LIST = """
about above access according action actual add address after again all allow already also always and another any
archive argument assume audio available avoid back base because been before best between bit blank block body both
bound break build but cache call can cannot canvas case change character check child class clear close code color
column command comment common compare complete complex compute condition connect contain content context continue
copy correct could count create current data date day default delay different directory display distribution
document does drive during each either element else empty end entry environment equal error even event every exact
example except exist expected extension extra fail false field file final find first fix flag follow for form format
found frame from full function get given group handle happen has have head help here how import include index
information instead into item just keep key kind know known large last leading least left length level like limit
line list little load local lock log long look loop machine mail main make man many map mark match may mean means
memory message method might missing mode more most must name need negative network never new next node normal not
nothing now number object off offset old once one only open operation option order origin original other our out
output over own package pair parent part pass path pattern place point position possible present print process
program provide purpose queue quote raise random range raw read reader real reason reference register relative
release remain remote report request result return right root round row run same sample save screen script search
second section see select sequence set shape short should show sign signal simple since single size small some sort
source space special speed split standard start state still stop string such suffix support table take target test
text than that the them then there these they thing this those through time title too top total true try two type
under until update use useful user valid value version visit wait want was way week were what when where whether
which while who width will with within without word work would write year you zero
"""
WORDS = tuple(_LIST.split())
